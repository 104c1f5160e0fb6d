"""Explain which layers keep all their filters."""

from torch import fx, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd
from torch.nn.utils import parametrize

from pliant.nn.compiler.builder import Builder
from pliant.nn.compiler.dispatch import LAYER_FUNCTIONS, match_embedding, match_layer
from pliant.nn.compiler.graphs import find_module, name_layer
from pliant.nn.compiler.refusals import has_hooks
from pliant.nn.compiler.rules_recurrent import RECURRENT


def explain_full_layers(builder: Builder, graph: fx.Graph) -> dict[str, str]:
    """Return every layer that is not in a site, and why, in forward order."""
    reasons: dict[str, str] = {}
    for node in graph.nodes:
        name, reason = _explain_node(builder, node)
        if reason:
            reasons.setdefault(name, reason)
    used = tuple(f"{node.target}." for node in graph.find_nodes(op="call_module"))
    sites = set(map(name_layer, builder.site_of_layer))
    for path, module in builder.modules.items():
        is_site = path in sites or builder.tensor_name(path, "weight") in builder.site_of_layer
        is_layer = isinstance(module, _ConvNd | nn.Linear) and not path.startswith(used)
        if is_layer and not is_site:
            reasons.setdefault(path, "forward does not use it")
    return reasons


def _explain_node(builder: Builder, node: fx.Node) -> tuple[str, str]:
    layer = match_layer(builder, node)
    if layer is not None:
        name = name_layer(layer.weight)
        if layer.weight in builder.site_of_layer:
            return name, ""
        if layer.groups > 1 and builder.shape(layer.weight)[1] == 1:
            return name, "a depthwise convolution keeps the filters of the channels it reads"
        if layer.groups > 1 and layer.is_transposed:
            return name, "a transposed convolution with groups has no rule"
        return name, builder.decisions.fixed.get(layer.weight, "it has a single filter")
    if (table := match_embedding(builder, node)) is not None:
        is_site = table.weight in builder.site_of_layer
        reason = builder.decisions.fixed.get(table.weight, "its entries are used in two ways")
        return name_layer(table.weight), "" if is_site else reason
    if node.op == "call_module":
        path = str(node.target)
        return path, _explain_module(builder.modules[path])
    if node.target in LAYER_FUNCTIONS:
        return find_module(node) or node.name, "its weight is computed in forward"
    return "", ""


def _explain_module(module: nn.Module) -> str:
    if not any(parameter.dim() > 1 for parameter in module.parameters()):
        return ""
    if has_hooks(module):
        return "it has hooks, which may read all channels"
    if parametrize.is_parametrized(module):
        return "its parameters are computed by torch.nn.utils.parametrize"
    if isinstance(module, _ConvTransposeNd):
        return "a transposed convolution with a given output size has no rule"
    if isinstance(module, RECURRENT):
        return "a recurrent layer keeps all hidden units"
    return f"{type(module).__name__} has no rule"
