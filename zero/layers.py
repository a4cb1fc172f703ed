"""The layers of a module, for stage 3: which modules are gathered and freed as one, and which parameters they own.

The smaller a layer, the less memory its weights need while they are there, and the more collectives a step takes. A
parameter that does not belong to exactly one layer (it is the model's own, or shared by two) cannot be freed with one,
and a small one is not worth a message: they stay whole.

Rajbhandari et al. 2019, "ZeRO", 5.3; lecture A, "Wrap Granularity". DeepSpeed's counterpart: modules without children,
and stage3_param_persistence_threshold. Left out: layers inside layers, which fsdp/ has.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from torch import nn

Named = dict[str, nn.Parameter]
NONE = -1  # in place of a layer's number


def layers_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The children of a module, by name, and those of its lists, dicts, sequences; a module without any by itself."""
    if not any(True for _ in module.children()):
        yield name, module
    for child_name, child in module.named_children():
        full = f"{name}.{child_name}" if name else child_name
        if isinstance(child, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(child):
            yield from layers_of(child, full)
        elif any(True for _ in child.parameters()):
            yield full, child


def named_layers(module: nn.Module, layers: Sequence[nn.Module] | None) -> list[tuple[str, nn.Module]]:
    """These layers, or `layers_of` the module, by name. Raises ValueError for one that is not in the module."""
    if layers is None:
        return list(layers_of(module))
    names = {part: name for name, part in module.named_modules()}
    if strangers := [layer for layer in layers if layer not in names]:
        raise ValueError(f"{type(strangers[0]).__name__} is no part of the module: name layers that it runs")
    return [(names[layer], layer) for layer in layers]


def owned(
    module: nn.Module, named: Named, layers: Sequence[tuple[str, nn.Module]], threshold: int
) -> tuple[list[Named], Named]:
    """Of a module's parameters those that each layer alone has, of more than `threshold` elements; and the rest."""
    layers_with: dict[nn.Module, list[int]] = defaultdict(list)
    for i, (_, layer) in enumerate(layers):
        for part in layer.modules():
            layers_with[part].append(i)
    holders: dict[nn.Parameter, set[int]] = defaultdict(set)
    for part in module.modules():
        for param in part.parameters(recurse=False):
            holders[param].update(layers_with.get(part, [NONE]))
    inside: list[Named] = [{} for _ in layers]
    rest: Named = {}
    for name, param in named.items():
        # IDEA: what lives and dies with one layer is cut; whatever else there is stays whole.
        [first, *others] = holders.get(param, [NONE])
        alone = first != NONE and not others and param.numel() > threshold
        (inside[first] if alone else rest)[name] = param
    return inside, rest
