"""Gives a tied head a place of its own, for which the checkpoint has no tensor."""

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
                    places[f"{parent}.{part}.{kind}"] = Destination(view, module.linear_method)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            places[f"{module_name}.{kind}"] = Destination(parameter.data)
    return places
