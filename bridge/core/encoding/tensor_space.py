"""A space for tensors of third-party servers that no Gymnasium space describes (D-24).

Numbers with a variable dimension that is not the first, text in two dimensions or more, protobuf messages.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf import any_pb2
from google.protobuf.message import Message
from gymnasium import Space

from bridge.core.encoding.tensors import Array, Spec, cast
from bridge.errors import TensorError
from bridge.pb import dm_env_rpc_pb2 as pb

__all__ = ["TensorSpace"]

_MOST = 8  # items along a variable dimension of a sample


class TensorSpace(Space[Any]):
    """The tensors that a TensorSpec allows.

    Elements are arrays of the spec's shape, one of whose dimensions may be of any length: of its dtype for numbers, of
    `str` or of protobuf messages (dtype object) else. A message arrives as a `google.protobuf.Any`, and is sent as one.
    An element of shape `()` is the string or message itself.

    Args:
        spec: The server's spec.
        seed: For `sample`.
    """

    def __init__(self, spec: Spec, seed: int | np.random.Generator | None = None) -> None:
        self.spec = spec
        super().__init__(None if -1 in spec.shape else spec.shape, spec.dtype, seed)

    @property
    def is_np_flattenable(self) -> bool:
        """No: there is no fixed length."""
        return False

    def sample(self, mask: Any = None, probability: Any = None) -> Any:
        """Return a random element: numbers within the range, empty strings, empty messages."""
        shape = tuple(int(self.np_random.integers(0, _MOST + 1)) if size < 0 else size for size in self.spec.shape)
        if self.spec.data_type == pb.STRING:
            return self.element(np.full(shape, "", object))
        if self.spec.data_type == pb.PROTO:
            messages = np.empty(shape, object)
            for index in np.ndindex(shape):
                messages[index] = any_pb2.Any()
            return self.element(messages)
        low = 0.0 if self.spec.minimum is None else self.spec.minimum
        high = low + np.asarray(1) if self.spec.maximum is None else self.spec.maximum
        return self.np_random.uniform(low, high, shape).astype(self.spec.dtype)

    def element(self, array: Array) -> Any:
        """Return the element that a tensor's array stands for."""
        return array[()] if array.dtype == object and array.shape == () else array

    def to_array(self, element: Any, *, rounding: bool = False) -> Array:
        """Return the array of an element.

        Raises:
            TensorError: It has another shape or type, or is out of range.
        """
        if self.spec.dtype == object:
            array = np.empty((), object)
            if isinstance(element, (str, Message)):
                array[()] = element
            else:
                array = np.asarray(element, object)
            kind: Any = str if self.spec.data_type == pb.STRING else Message
            if not all(isinstance(item, kind) for item in array.ravel()):
                raise TensorError(f"expected {self.spec.describe()}, got {element!r:.80}")
        else:
            array = cast(element, self.spec.dtype, rounding=rounding)
        if not self.spec.fits(array.shape):
            raise TensorError(f"expected {self.spec.describe()}, got the shape {list(array.shape)}")
        self.spec.check_range(array)
        return array

    def contains(self, x: Any) -> bool:
        """True if something is an element."""
        try:
            self.to_array(x, rounding=True)
        except (TensorError, ValueError, TypeError):
            return False
        return True

    def __repr__(self) -> str:
        return f"TensorSpace({self.spec.describe()})"

    def __eq__(self, other: object) -> bool:
        # Compare messages: comparing specs whose bounds are arrays gives no single truth value.
        return isinstance(other, TensorSpace) and self.spec.to_proto() == other.spec.to_proto()
