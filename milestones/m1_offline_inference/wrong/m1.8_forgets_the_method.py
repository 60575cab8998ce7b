"""Leaves the linear method out of the place: a quantized weight is then loaded, and cut, as if it were a plain one."""


def checkpoint_places(model):
    places, seen = {}, set()
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, leaf = name.rpartition(".")
            for kind, views in module.weight_views().items():
                for part, view in zip(model.packed_modules_mapping.get(leaf, [leaf]), views, strict=True):
                    places[f"{parent}.{part}.{kind}" if parent else f"{part}.{kind}"] = Destination(view)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in seen:
                places[f"{name}.{kind}"] = Destination(parameter.data)
                seen.add(id(parameter))
    return places
