"""Hands out copies of the parts: the checkpoint is read into them, and the model keeps what it had."""

from folovllm.layers.linear import LinearBase
from folovllm.models.loader import Destination


def checkpoint_places(model):
    places, seen = {}, set()
    for module_name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = module_name.rpartition(".")
            parts = model.packed_modules_mapping.get(leaf, [leaf])
            for kind, views in module.weight_views().items():
                for part, view in zip(parts, views):
                    places[f"{parent}.{part}.{kind}"] = Destination(view.clone(), module.linear_method)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{module_name}.{kind}"] = Destination(parameter.data)
                seen.add(id(parameter))
    return places
