"""The public methods of the installed SDK, by reflection: of its clients and futures, and of the
types that it hands out or takes. Knows no server.
"""

import inspect

import pydantic
import tinker
from tinker import types

# The insides of the SDK's HTTP client: no method of the SDK hands one out.
INNER = {"APIResponse", "AsyncAPIResponse", "Timeout", "RequestOptions"}


def public_classes():
    """Name to class: everything that `tinker` and `tinker.types` export, errors aside."""
    found = {}
    for module in (types, tinker):
        for name, value in ((name, getattr(module, name)) for name in dir(module)):
            if not name.startswith("_") and inspect.isclass(value) and name not in INNER:
                ours = value.__module__.startswith("tinker")
                if ours and not issubclass(value, BaseException):
                    found[name] = value
    return found


def public_methods():
    """("TrainingClient.forward", ...), sorted: methods and properties that the SDK itself defines;
    what pydantic gives every model is left out."""
    return sorted(
        f"{name}.{method}"
        for name, cls in public_classes().items()
        for method in dir(cls)
        if not method.startswith("_")
        and not hasattr(pydantic.BaseModel, method)
        and is_method_of_the_sdk(cls, method)
    )


def is_method_of_the_sdk(cls, name):
    for owner in cls.__mro__:
        if name in vars(owner):
            value = vars(owner)[name]
            value = value.fget if isinstance(value, property) else value
            value = getattr(value, "__func__", value)
            return inspect.isfunction(value) and owner.__module__.startswith("tinker")
    return False
