from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CallRequest(_message.Message):
    __slots__ = ["args", "kwargs", "lanes", "look", "name"]
    ARGS_FIELD_NUMBER: _ClassVar[int]
    KWARGS_FIELD_NUMBER: _ClassVar[int]
    LANES_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    args: Value.List
    kwargs: Value.Dict
    lanes: _containers.RepeatedScalarFieldContainer[int]
    look: bool
    name: str
    def __init__(self, name: _Optional[str] = ..., args: _Optional[_Union[Value.List, _Mapping]] = ..., kwargs: _Optional[_Union[Value.Dict, _Mapping]] = ..., lanes: _Optional[_Iterable[int]] = ..., look: bool = ...) -> None: ...

class CallResponse(_message.Message):
    __slots__ = ["is_method", "results"]
    IS_METHOD_FIELD_NUMBER: _ClassVar[int]
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    is_method: bool
    results: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, results: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., is_method: bool = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ["agents", "array", "big_integer", "boolean", "complex", "data", "dict", "form", "frozenset", "integer", "list", "missing", "none", "notes", "number", "reward", "set", "text", "tuple"]
    class Array(_message.Message):
        __slots__ = ["data", "dtype", "is_scalar", "items", "shape"]
        DATA_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        IS_SCALAR_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        data: bytes
        dtype: str
        is_scalar: bool
        items: _containers.RepeatedCompositeFieldContainer[Value]
        shape: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., is_scalar: bool = ...) -> None: ...
    class Complex(_message.Message):
        __slots__ = ["imaginary", "real"]
        IMAGINARY_FIELD_NUMBER: _ClassVar[int]
        REAL_FIELD_NUMBER: _ClassVar[int]
        imaginary: float
        real: float
        def __init__(self, real: _Optional[float] = ..., imaginary: _Optional[float] = ...) -> None: ...
    class Dict(_message.Message):
        __slots__ = ["any_keys", "keys", "values"]
        ANY_KEYS_FIELD_NUMBER: _ClassVar[int]
        KEYS_FIELD_NUMBER: _ClassVar[int]
        VALUES_FIELD_NUMBER: _ClassVar[int]
        any_keys: _containers.RepeatedCompositeFieldContainer[Value]
        keys: _containers.RepeatedScalarFieldContainer[str]
        values: _containers.RepeatedCompositeFieldContainer[Value]
        def __init__(self, keys: _Optional[_Iterable[str]] = ..., values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., any_keys: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    class Empty(_message.Message):
        __slots__ = []
        def __init__(self) -> None: ...
    class List(_message.Message):
        __slots__ = ["items"]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        items: _containers.RepeatedCompositeFieldContainer[Value]
        def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    FROZENSET_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedScalarFieldContainer[str]
    array: Value.Array
    big_integer: str
    boolean: bool
    complex: Value.Complex
    data: bytes
    dict: Value.Dict
    form: Value
    frozenset: Value.List
    integer: int
    list: Value.List
    missing: _containers.RepeatedScalarFieldContainer[str]
    none: Value.Empty
    notes: _containers.RepeatedScalarFieldContainer[str]
    number: float
    reward: Value
    set: Value.List
    text: str
    tuple: Value.List
    def __init__(self, none: _Optional[_Union[Value.Empty, _Mapping]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., big_integer: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., data: _Optional[bytes] = ..., array: _Optional[_Union[Value.Array, _Mapping]] = ..., list: _Optional[_Union[Value.List, _Mapping]] = ..., tuple: _Optional[_Union[Value.List, _Mapping]] = ..., dict: _Optional[_Union[Value.Dict, _Mapping]] = ..., set: _Optional[_Union[Value.List, _Mapping]] = ..., frozenset: _Optional[_Union[Value.List, _Mapping]] = ..., complex: _Optional[_Union[Value.Complex, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., form: _Optional[_Union[Value, _Mapping]] = ..., reward: _Optional[_Union[Value, _Mapping]] = ..., agents: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ...) -> None: ...
