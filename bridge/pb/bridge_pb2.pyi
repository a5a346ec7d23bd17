from bridge.pb import dm_env_rpc_pb2 as _dm_env_rpc_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
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

class PlacingRequest(_message.Message):
    __slots__ = ["request", "requested_observations"]
    REQUESTED_OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    request: bytes
    requested_observations: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request: _Optional[bytes] = ..., requested_observations: _Optional[_Iterable[int]] = ...) -> None: ...

class PlacingResponse(_message.Message):
    __slots__ = ["response", "step"]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    response: bytes
    step: _dm_env_rpc_pb2.StepResponse
    def __init__(self, response: _Optional[bytes] = ..., step: _Optional[_Union[_dm_env_rpc_pb2.StepResponse, _Mapping]] = ...) -> None: ...

class Value(_message.Message):
    __slots__ = ["agents", "array", "begun", "big_integer", "boolean", "column", "complex", "data", "dict", "failed", "form", "frozenset", "integer", "list", "missing", "names", "none", "notes", "number", "reads_columns", "reward", "set", "text", "tuple"]
    class Array(_message.Message):
        __slots__ = ["column", "data", "dtype", "is_scalar", "items", "shape"]
        COLUMN_FIELD_NUMBER: _ClassVar[int]
        DATA_FIELD_NUMBER: _ClassVar[int]
        DTYPE_FIELD_NUMBER: _ClassVar[int]
        IS_SCALAR_FIELD_NUMBER: _ClassVar[int]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        SHAPE_FIELD_NUMBER: _ClassVar[int]
        column: Value.Column
        data: bytes
        dtype: str
        is_scalar: bool
        items: _containers.RepeatedCompositeFieldContainer[Value]
        shape: _containers.RepeatedScalarFieldContainer[int]
        def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ..., is_scalar: bool = ..., column: _Optional[_Union[Value.Column, _Mapping]] = ...) -> None: ...
    class Begun(_message.Message):
        __slots__ = ["code", "info", "lanes", "message", "rows"]
        CODE_FIELD_NUMBER: _ClassVar[int]
        INFO_FIELD_NUMBER: _ClassVar[int]
        LANES_FIELD_NUMBER: _ClassVar[int]
        MESSAGE_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        code: int
        info: bytes
        lanes: _containers.RepeatedScalarFieldContainer[int]
        message: str
        rows: _containers.RepeatedScalarFieldContainer[bytes]
        def __init__(self, lanes: _Optional[_Iterable[int]] = ..., rows: _Optional[_Iterable[bytes]] = ..., info: _Optional[bytes] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
    class Column(_message.Message):
        __slots__ = ["arrays", "count", "is_tuple", "nones", "numbers", "objects", "rows", "texts"]
        ARRAYS_FIELD_NUMBER: _ClassVar[int]
        COUNT_FIELD_NUMBER: _ClassVar[int]
        IS_TUPLE_FIELD_NUMBER: _ClassVar[int]
        NONES_FIELD_NUMBER: _ClassVar[int]
        NUMBERS_FIELD_NUMBER: _ClassVar[int]
        OBJECTS_FIELD_NUMBER: _ClassVar[int]
        ROWS_FIELD_NUMBER: _ClassVar[int]
        TEXTS_FIELD_NUMBER: _ClassVar[int]
        arrays: Value.Array
        count: int
        is_tuple: bool
        nones: bytes
        numbers: Value.Array
        objects: int
        rows: Value.Table
        texts: Value.Texts
        def __init__(self, count: _Optional[int] = ..., objects: _Optional[int] = ..., is_tuple: bool = ..., numbers: _Optional[_Union[Value.Array, _Mapping]] = ..., arrays: _Optional[_Union[Value.Array, _Mapping]] = ..., texts: _Optional[_Union[Value.Texts, _Mapping]] = ..., rows: _Optional[_Union[Value.Table, _Mapping]] = ..., nones: _Optional[bytes] = ...) -> None: ...
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
    class Form(_message.Message):
        __slots__ = ["columns", "keys", "kind"]
        class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
            __slots__ = []
        COLUMNS_FIELD_NUMBER: _ClassVar[int]
        DICT: Value.Form.Kind
        KEYS_FIELD_NUMBER: _ClassVar[int]
        KIND_FIELD_NUMBER: _ClassVar[int]
        LIST: Value.Form.Kind
        TUPLE: Value.Form.Kind
        columns: _containers.RepeatedCompositeFieldContainer[Value]
        keys: _containers.RepeatedScalarFieldContainer[str]
        kind: Value.Form.Kind
        def __init__(self, kind: _Optional[_Union[Value.Form.Kind, str]] = ..., keys: _Optional[_Iterable[str]] = ..., columns: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    class List(_message.Message):
        __slots__ = ["items"]
        ITEMS_FIELD_NUMBER: _ClassVar[int]
        items: _containers.RepeatedCompositeFieldContainer[Value]
        def __init__(self, items: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...
    class Table(_message.Message):
        __slots__ = ["form_of", "forms"]
        FORMS_FIELD_NUMBER: _ClassVar[int]
        FORM_OF_FIELD_NUMBER: _ClassVar[int]
        form_of: bytes
        forms: _containers.RepeatedCompositeFieldContainer[Value.Form]
        def __init__(self, forms: _Optional[_Iterable[_Union[Value.Form, _Mapping]]] = ..., form_of: _Optional[bytes] = ...) -> None: ...
    class Texts(_message.Message):
        __slots__ = ["joined", "lengths"]
        JOINED_FIELD_NUMBER: _ClassVar[int]
        LENGTHS_FIELD_NUMBER: _ClassVar[int]
        joined: str
        lengths: Value.Array
        def __init__(self, joined: _Optional[str] = ..., lengths: _Optional[_Union[Value.Array, _Mapping]] = ...) -> None: ...
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    ARRAY_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    COLUMN_FIELD_NUMBER: _ClassVar[int]
    COMPLEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    DICT_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    FROZENSET_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    MISSING_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    NONE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    READS_COLUMNS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    SET_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    agents: _containers.RepeatedScalarFieldContainer[str]
    array: Value.Array
    begun: Value.Begun
    big_integer: str
    boolean: bool
    column: Value.Column
    complex: Value.Complex
    data: bytes
    dict: Value.Dict
    failed: _containers.RepeatedScalarFieldContainer[int]
    form: Value
    frozenset: Value.List
    integer: int
    list: Value.List
    missing: _containers.RepeatedScalarFieldContainer[str]
    names: str
    none: Value.Empty
    notes: _containers.RepeatedScalarFieldContainer[str]
    number: float
    reads_columns: bool
    reward: Value
    set: Value.List
    text: str
    tuple: Value.List
    def __init__(self, none: _Optional[_Union[Value.Empty, _Mapping]] = ..., boolean: bool = ..., integer: _Optional[int] = ..., big_integer: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., data: _Optional[bytes] = ..., array: _Optional[_Union[Value.Array, _Mapping]] = ..., list: _Optional[_Union[Value.List, _Mapping]] = ..., tuple: _Optional[_Union[Value.List, _Mapping]] = ..., dict: _Optional[_Union[Value.Dict, _Mapping]] = ..., set: _Optional[_Union[Value.List, _Mapping]] = ..., frozenset: _Optional[_Union[Value.List, _Mapping]] = ..., complex: _Optional[_Union[Value.Complex, _Mapping]] = ..., column: _Optional[_Union[Value.Column, _Mapping]] = ..., notes: _Optional[_Iterable[str]] = ..., form: _Optional[_Union[Value, _Mapping]] = ..., failed: _Optional[_Iterable[int]] = ..., names: _Optional[str] = ..., reads_columns: bool = ..., reward: _Optional[_Union[Value, _Mapping]] = ..., agents: _Optional[_Iterable[str]] = ..., missing: _Optional[_Iterable[str]] = ..., begun: _Optional[_Union[Value.Begun, _Mapping]] = ...) -> None: ...
