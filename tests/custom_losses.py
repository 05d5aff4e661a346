"""A function as the server gets it: traced and encoded by the SDK."""

from tinker.lib.public_interfaces.custom_loss import encode_graph, trace_loss

from trimtab.types import CustomLoss, CustomLossInput, CustomLossNode


def encoded(function, **ranks):
    handle = trace_loss(function, ranks, "session")
    nodes = encode_graph(handle).model_dump()["nodes"]
    inputs = tuple(CustomLossInput(i.name, i.rank) for i in handle.inputs)
    return CustomLoss(
        handle.name,
        inputs,
        tuple(
            CustomLossNode(n["op"], n["name"], n["target"], tuple(n["args"]), n["kwargs"])
            for n in nodes
        ),
    )
