"""Keeps the merged layers' own names, which no checkpoint has: all of it is then left over."""

from folovllm.layers.linear import LinearBase
from folovllm.models.loader import Destination


def checkpoint_places(model):
    places, seen = {}, set()
    for module_name, module in model.named_modules():
        if isinstance(module, LinearBase):
            for kind, views in module.weight_views().items():
                places |= {f"{module_name}.{kind}": Destination(view, module.linear_method) for view in views}
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{module_name}.{kind}"] = Destination(parameter.data)
                seen.add(id(parameter))
    return places
