"""Of tied weights the last name stays, not the first. Input: a model whose head shares the embedding."""

def checkpoint_places(model):
    places, names = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, LinearBase):
            parent, _, last = name.rpartition(".")
            parts = model.packed_modules_mapping.get(last, [last])
            for kind, views in module.weight_views().items():
                for part, view in zip(parts, views, strict=True):
                    places[".".join(filter(None, (parent, part, kind)))] = Destination(view, module.linear_method)
            continue
        for kind, parameter in module.named_parameters(recurse=False):
            full = f"{name}.{kind}" if name else kind
            if id(parameter) in names:
                del places[names[id(parameter)]]
            names[id(parameter)] = full
            places[full] = Destination(parameter.data)
    return places
