from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ReleaseStates(_message.Message):
    __slots__ = ["states"]
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, states: _Optional[_Iterable[str]] = ...) -> None: ...

class RestoreStates(_message.Message):
    __slots__ = ["branches"]
    class Branch(_message.Message):
        __slots__ = ["lane", "seed", "state"]
        LANE_FIELD_NUMBER: _ClassVar[int]
        SEED_FIELD_NUMBER: _ClassVar[int]
        STATE_FIELD_NUMBER: _ClassVar[int]
        lane: int
        seed: int
        state: str
        def __init__(self, state: _Optional[str] = ..., lane: _Optional[int] = ..., seed: _Optional[int] = ...) -> None: ...
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    branches: _containers.RepeatedCompositeFieldContainer[RestoreStates.Branch]
    def __init__(self, branches: _Optional[_Iterable[_Union[RestoreStates.Branch, _Mapping]]] = ...) -> None: ...

class SaveStates(_message.Message):
    __slots__ = ["lanes"]
    LANES_FIELD_NUMBER: _ClassVar[int]
    lanes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lanes: _Optional[_Iterable[int]] = ...) -> None: ...

class StatesRequest(_message.Message):
    __slots__ = ["release", "restore", "save"]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    RESTORE_FIELD_NUMBER: _ClassVar[int]
    SAVE_FIELD_NUMBER: _ClassVar[int]
    release: ReleaseStates
    restore: RestoreStates
    save: SaveStates
    def __init__(self, save: _Optional[_Union[SaveStates, _Mapping]] = ..., restore: _Optional[_Union[RestoreStates, _Mapping]] = ..., release: _Optional[_Union[ReleaseStates, _Mapping]] = ...) -> None: ...

class StatesResponse(_message.Message):
    __slots__ = ["states"]
    class State(_message.Message):
        __slots__ = ["bytes", "environment", "how", "identifier"]
        BYTES_FIELD_NUMBER: _ClassVar[int]
        ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
        HOW_FIELD_NUMBER: _ClassVar[int]
        IDENTIFIER_FIELD_NUMBER: _ClassVar[int]
        bytes: int
        environment: str
        how: str
        identifier: str
        def __init__(self, identifier: _Optional[str] = ..., how: _Optional[str] = ..., bytes: _Optional[int] = ..., environment: _Optional[str] = ...) -> None: ...
    STATES_FIELD_NUMBER: _ClassVar[int]
    states: _containers.RepeatedCompositeFieldContainer[StatesResponse.State]
    def __init__(self, states: _Optional[_Iterable[_Union[StatesResponse.State, _Mapping]]] = ...) -> None: ...
