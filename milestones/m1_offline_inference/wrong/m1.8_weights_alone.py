"""Takes only weights: the biases of Qwen2's projections have no place."""

from folovllm.layers.linear import LinearBase
from folovllm.models.loader import Destination


def checkpoint_places(model):
    places, seen = {}, set()
    for module_name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = module_name.rpartition(".")
            parts = model.packed_modules_mapping.get(leaf, [leaf])
            for part, view in zip(parts, module.weight_views()["weight"]):
                places[f"{parent}.{part}.weight"] = Destination(view, module.linear_method)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{module_name}.{kind}"] = Destination(parameter.data)
                seen.add(id(parameter))
    return places
