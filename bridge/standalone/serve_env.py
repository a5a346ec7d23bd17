#!/usr/bin/env python3
"""Serve a Gym or Gymnasium environment over dm_env_rpc: one file, for Python 3.7 and newer.

    python serve_env.py CartPole-v1 --port 50051
    python serve_env.py my_package:MyEnv-v0 --port 50051 --num-envs 4     imports what registers the environment
    python serve_env.py my_package.envs:make_env --port 50051             calls what makes it
    python serve_env.py gym:CartPole-v1 --port 50051                      of gym, where Gymnasium is there too
    python serve_env.py MyEnv-v0 --env-kwargs map_name=8x8 slippery=False
    python serve_env.py MyEnv-v0 --host 0.0.0.0 --port 50051 --token-file token --tls-certificate c.pem --tls-key k.pem

It needs grpcio, protobuf and numpy, in whatever versions the environment's Python has, and `gym` from 0.21 on or any
Gymnasium. The client is Gymnasium Bridge, in a Python of its own, on this machine or another one:

    env = bridge.make_remote("grpc://HOST:50051")

The file is also an example of a server for an engine of your own: `serve` takes a function that makes anything with
`observation_space`, `action_space`, `reset`, `step` and `close`. From top to bottom it has

    messages     the protocol's messages, made without generated code
    tensors      numpy arrays to and from tensors, and the specs that say what fits
    values       any plain Python value to and from bytes: infos, options, arguments
    spaces       a space as JSON, and cut into one tensor for each leaf
    simulator    the differences between the versions of `gym` and Gymnasium
    world        one environment, or several lanes that are stepped in a loop
    properties   what a client can ask about the server and its world
    session      the requests of one connection, one answer for each
    server       worlds, connections, the token
    command      the command line

Requests are answered in the main thread, one at a time: each environment is made, stepped, drawn and closed by one
thread. The other threads only carry bytes.
"""

import sys

# Python 2.7 to 3.5 end at the first syntax that they do not know, and print its line: so it is this one that says why.
# Python 3.6 reads the whole file, but has no dataclasses.
if sys.version_info < (3, 7):  # noqa: UP036 - the users of older ones are to be told
    raise SystemExit(f"serve_env.py needs Python 3.7 or newer; this is {sys.version.split()[0]}")

import argparse
import ast
import contextlib
import dataclasses
import enum
import importlib
import inspect
import json
import logging
import os
import pathlib
import queue
import re
import secrets
import signal
import string
import time
import traceback
from collections.abc import Mapping
from concurrent import futures

try:
    import grpc
    import numpy as np
    from google.protobuf import descriptor_pb2, descriptor_pool, message, message_factory
except ImportError as error:
    raise SystemExit(f"{error}: {sys.executable} -m pip install grpcio protobuf numpy") from None

VERSION = "0.1.0"
log = logging.getLogger("serve_env")


# Messages
# ========
# A line for each message: `name:type=number` are its fields, with `*` where one repeats and `|` where only one of them
# is set. A map is written as it travels, as entries of key and value: they keep their order, which a map of Protobuf
# does not, and old versions of Protobuf read them. An enum is a number. The messages down to `PropertyResponse` are
# those of dm_env_rpc; `Value` and what it is made of are Gymnasium Bridge's own, and travel in a tensor of bytes. In
# another language, generate them from the .proto files of dm_env_rpc instead.

SCHEMA = """
Any           type_url:string=1 value:bytes=2
Status        code:int32=1 message:string=2
Empty
Floats        array:*float=1
Doubles       array:*double=1
Int32s        array:*int32=1
Int64s        array:*int64=1
Uint32s       array:*uint32=1
Uint64s       array:*uint64=1
Bytes         array:bytes=1
Bools         array:*bool=1
Strings       array:*string=1
Tensor        |floats:Floats=1 |doubles:Doubles=2 |int8s:Bytes=3 |int32s:Int32s=4 |int64s:Int64s=5 |uint8s:Bytes=6
              |uint32s:Uint32s=7 |uint64s:Uint64s=8 |bools:Bools=9 |strings:Strings=10 shape:*int32=15
Bound         |floats:Floats=9 |doubles:Doubles=10 |int8s:Bytes=11 |int32s:Int32s=12 |int64s:Int64s=13
              |uint8s:Bytes=14 |uint32s:Uint32s=15 |uint64s:Uint64s=16
TensorSpec    name:string=1 shape:*int32=2 dtype:int32=3 min:Bound=4 max:Bound=5
SpecEntry     key:uint64=1 value:TensorSpec=2
TensorEntry   key:uint64=1 value:Tensor=2
Setting       key:string=1 value:Tensor=2
Specs         actions:*SpecEntry=1 observations:*SpecEntry=2
Settings      settings:*Setting=1
WorldName     world_name:string=1
JoinWorld     world_name:string=1 settings:*Setting=2
Joined        specs:Specs=1
Step          actions:*TensorEntry=1 requested_observations:*uint64=2
Stepped       state:int32=1 observations:*TensorEntry=2
EnvironmentRequest   |create_world:Settings=1 |join_world:JoinWorld=2 |step:Step=3 |reset:Settings=4
                     |reset_world:JoinWorld=5 |leave_world:Empty=6 |destroy_world:WorldName=7 |extension:Any=15
EnvironmentResponse  |create_world:WorldName=1 |join_world:Joined=2 |step:Stepped=3 |reset:Joined=4
                     |reset_world:Empty=5 |leave_world:Empty=6 |destroy_world:Empty=7 |extension:Any=15 |error:Status=16
PropertySpec  spec:TensorSpec=1 is_readable:bool=2 is_writable:bool=3 is_listable:bool=4 description:string=5
PropertyKey   key:string=1
PropertyValue value:Tensor=1
PropertyList  values:*PropertySpec=1
PropertyRequest   |read_property:PropertyKey=1 |write_property:PropertyKey=2 |list_property:PropertyKey=3
PropertyResponse  |read_property:PropertyValue=1 |list_property:PropertyList=3
Value         |none:Empty=1 |boolean:bool=2 |integer:sint64=3 |big_integer:string=4 |number:double=5 |text:string=6
              |data:bytes=7 |array:Array=8 |list:List=9 |tuple:List=10 |dict:Dict=11 |set:List=12 |frozenset:List=13
              |complex:Complex=14 notes:*string=15 form:Value=16
Array         dtype:string=1 shape:*int64=2 data:bytes=3 items:*Value=4 is_scalar:bool=5
List          items:*Value=1
Dict          keys:*string=1 values:*Value=2 any_keys:*Value=3
Complex       real:double=1 imaginary:double=2
"""
SCALARS = {"double": 1, "float": 2, "int64": 3, "uint64": 4, "int32": 5, "bool": 8, "string": 9, "bytes": 12}
SCALARS.update(uint32=13, sint64=18)
RUNNING, TERMINATED, INTERRUPTED = 1, 2, 3
SERVICE, METHOD = "dm_env_rpc.v1.Environment", "Process"
PROPERTY_URL = "type.googleapis.com/dm_env_rpc.v1.extensions.properties.Property"
HELLO = "gymnasium-bridge"  # the key of metadata by which its client knows that the exact spaces are there


def make_messages(schema):
    """Return the message classes of a schema, by name.

    They are in a separate descriptor pool, so they cannot collide with the messages of the package dm_env_rpc in the
    same process. Generated code would need the Protobuf version for which it was generated.
    """
    file = descriptor_pb2.FileDescriptorProto(name="serve_env.proto", package="serve_env", syntax="proto3")
    for line in re.sub(r"\n +", " ", schema).split("\n")[1:-1]:
        message = file.message_type.add(name=line.split()[0])
        for field in line.split()[1:]:
            choice, name, repeated, kind, number = re.match(r"(\|?)(\w+):(\*?)(\w+)=(\d+)$", field).groups()
            added = message.field.add(name=name, number=int(number), label=3 if repeated else 1)
            added.type = SCALARS.get(kind, 11)
            if kind not in SCALARS:
                added.type_name = ".serve_env." + kind
            if choice:
                added.oneof_index = 0
                if not message.oneof_decl:
                    message.oneof_decl.add(name="payload")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    # Protobuf 4.22 brought `GetMessageClass`; newer versions have no `MessageFactory`.
    make = getattr(message_factory, "GetMessageClass", None) or message_factory.MessageFactory(pool).GetPrototype
    names = [message.name for message in file.message_type]
    return type("Messages", (), {name: make(pool.FindMessageTypeByName("serve_env." + name)) for name in names})


pb = make_messages(SCHEMA)

INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, PERMISSION_DENIED, RESOURCE_EXHAUSTED = 3, 4, 5, 7, 8
FAILED_PRECONDITION, UNIMPLEMENTED, INTERNAL, UNAVAILABLE = 9, 12, 13, 14


class Refusal(Exception):  # noqa: N818 - it becomes an answer
    """A request is refused: the text and the status code for the error response."""

    def __init__(self, text, code=INVALID_ARGUMENT):
        # An environment's error may hold lone surrogates, as paths do, which no text of Protobuf may.
        super().__init__(text.encode("utf-8", "backslashreplace").decode())
        self.code = code


# Tensors
# =======
# The number of a data type is also that of its payload in a Tensor. Text is an array of objects.

PAYLOADS = {"<f4": "floats", "<f8": "doubles", "|i1": "int8s", "<i4": "int32s", "<i8": "int64s", "|u1": "uint8s"}
PAYLOADS.update({"<u4": "uint32s", "<u8": "uint64s", "|b1": "bools", "|O": "strings"})
DATA_TYPES = {payload: number for number, payload in enumerate(PAYLOADS.values(), start=1)}
DTYPES = {payload: np.dtype(code) for code, payload in PAYLOADS.items()}
WIDER = {"<f2": "<f4", "<i2": "<i4", "<u2": "<u4"}  # these travel in a wider type, and come back exactly
# Of a message; elements of a setting that a single one fills; of a shape. By the shape that it announces, a message of
# a few bytes could take all memory, and one of many dimensions hours.
MAX_BYTES, MAX_FILLED, MAX_DIMENSIONS = 512 * 1024 * 1024, 4096, 32


def wire_dtype(dtype):
    """Return the dtype in which values of a dtype are sent."""
    code = np.dtype(dtype).newbyteorder("<").str
    code = WIDER.get(code, code)
    if code not in PAYLOADS:
        raise Refusal(f"the dtype {dtype} cannot be sent; use numbers of at most 64 bits", FAILED_PRECONDITION)
    return np.dtype(code)


def cast(value, dtype, rounding=False):
    """Convert a value to an array of a dtype; refuse if this changes values, except by `rounding` of floats."""
    array, wanted = np.asarray(value), np.dtype(dtype)
    if array.dtype == wanted:
        return array
    if array.dtype.kind not in "biuf" or wanted.kind not in "biuf":
        raise Refusal(f"expected numbers for {wanted}, got {value!r:.80}")
    with np.errstate(all="ignore"):
        result = array.astype(wanted)
        # Both ways: NumPy compares 2**53 + 1 and the float64 2.0**53 as floats, and calls them equal; -1 as uint64
        # comes back as -1, and is not equal.
        same = (result == array) & (result.astype(array.dtype) == array)
        if array.dtype.kind == wanted.kind == "f":
            same = same | ~np.isfinite(array) | (rounding & np.isfinite(result))
    if not np.all(same):
        raise Refusal(f"{value!r:.80} ({array.dtype}) does not fit {wanted} without loss")
    return result


def fill(message, array):
    """Put the elements of an array into a Tensor or a Bound."""
    payload = PAYLOADS[array.dtype.str]
    part = getattr(message, payload)
    part.SetInParent()
    if payload in ("floats", "doubles", "bools", "int8s", "uint8s"):
        # On the wire a packed list of floats is the array's memory behind a length, and so is a field of bytes with the
        # same number. This is far quicker than number by number. Integers are varints, of 1 to 10 bytes each.
        part.MergeFromString(pb.Bytes(array=array.tobytes()).SerializeToString())
    else:
        part.array.extend(array.ravel().tolist())


def pack(value, tensor=None):
    """Return the tensor for a number, a text, or an array of them."""
    array, tensor = np.asarray(value), pb.Tensor() if tensor is None else tensor
    array = array.astype(object if array.dtype.kind in "UO" else wire_dtype(array.dtype), copy=False)
    fill(tensor, array)
    tensor.shape.extend(array.shape)
    return tensor


def unpack(tensor, name, shape=None):
    """Return a tensor's values as a writable array; if `shape` is given, the array must have this shape.

    One negative dimension is computed from the number of elements, and a single element fills `shape`.
    """
    payload, found = tensor.WhichOneof("payload"), list(tensor.shape)
    if payload not in DTYPES:
        raise Refusal(f"{name}: expected a tensor of numbers or text, got one of {payload or 'nothing'}")
    elements, dtype = getattr(tensor, payload).array, DTYPES[payload]
    flat = np.frombuffer(elements, dtype) if isinstance(elements, bytes) else np.array(list(elements), dtype)
    if len(found) <= MAX_DIMENSIONS and sum(size < 0 for size in found) == 1:
        rest = int(np.prod(np.array([size for size in found if size >= 0], object)))
        found = [(flat.size // rest if rest else 0) if size < 0 else size for size in found]
    if len(found) > MAX_DIMENSIONS or min(found, default=0) < 0 or (shape is not None and tuple(found) != shape):
        wanted = f"{MAX_DIMENSIONS} dimensions at most, one variable" if shape is None else f"the shape {list(shape)}"
        raise Refusal(f"{name}: expected {wanted}, got the shape {list(tensor.shape)!s:.80}")
    count = int(np.prod(np.array(found, object)))
    if flat.size == 1 < count and (shape is not None or count <= MAX_FILLED):
        return np.full(found, flat[0], flat.dtype)
    if flat.size != count:
        raise Refusal(f"{name}: the shape {list(tensor.shape)} does not hold {flat.size} elements")
    return np.array(flat.reshape(found))


class Field:
    """The required name, shape, dtype and inclusive bounds of a tensor; bounds have its shape, or are single numbers.

    With `lanes` it is the spec of that many such tensors, stacked.
    """

    def __init__(self, name, shape, dtype, low=None, high=None, lanes=None):
        batch = () if lanes is None else (lanes,)
        self.name, self.shape, self.dtype = name, batch + tuple(int(size) for size in shape), wire_dtype(dtype)
        self.low, self.high = self._bound(low, 0, batch), self._bound(high, 1, batch)

    def _bound(self, bound, side, batch):
        """Return a bound as a single number if it is uniform, and None if it excludes nothing."""
        if bound is None or self.dtype.kind in "bO" or not np.size(bound):
            return None
        bound, is_float = cast(bound, self.dtype), self.dtype.kind == "f"
        uniform = (bound == bound.flat[0]).all()
        limits = (-np.inf, np.inf) if is_float else (np.iinfo(self.dtype).min, np.iinfo(self.dtype).max)
        if uniform and bound.flat[0] == limits[side]:
            return None
        return np.array(bound.flat[0] if uniform else np.broadcast_to(bound, batch + bound.shape))

    def message(self):
        """Return the spec as a message."""
        found = pb.TensorSpec(name=self.name, shape=self.shape, dtype=DATA_TYPES[PAYLOADS[self.dtype.str]])
        for side, bound in ((found.min, self.low), (found.max, self.high)):
            if bound is not None:
                fill(side, bound)
        return found

    def read(self, tensor):
        """Return the array of a tensor that matches this spec; refuse others."""
        payload, got = PAYLOADS[self.dtype.str], tensor.WhichOneof("payload")
        if got != payload:
            raise Refusal(f"{self.name!r}: expected {payload} of the shape {list(self.shape)}, got {got}")
        array = unpack(tensor, repr(self.name), self.shape)
        for bound, inside, side in ((self.low, np.greater_equal, "below"), (self.high, np.less_equal, "above")):
            if bound is not None and not inside(array, bound).all():
                raise Refusal(f"{self.name!r}: got {array!s:.80}, which is {side} {bound!s:.80}")
        return array


# Values
# ======
# None, bool, int, float, complex, str, bytes, NumPy's scalars and arrays, lists, tuples, sets and dicts travel as they
# are. Nothing is ever unpickled.

MAX_DEPTH, MAX_DIGITS = 32, 4000
PLAIN_DTYPE = re.compile(r"[<>|]?[biufcUSMm]\d{1,9}(\[\d*[a-z]+\])?$", re.IGNORECASE)


def note(notes, place, text):
    """Add a note for the client about a place, once per place and for at most 100; items of a list are one place."""
    if len(notes) < 100:
        notes.setdefault(re.sub(r"\[\d+\]", "[]", place), text)


def encode(value, where="value", notes=None, message=None, depth=0):
    """Return the message for a value. With `notes`, a dict, unsupported values are omitted or None, and noted."""
    message = pb.Value() if message is None else message
    # The order matters: an IntEnum is an int, a float64 of NumPy is a float, and a bool is an int.
    if isinstance(value, enum.Enum):
        value = value.value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if depth > MAX_DEPTH:
        raise Refusal(f"{where} is nested more than {MAX_DEPTH} levels deep")
    if value is None:
        message.none.SetInParent()
    elif isinstance(value, (np.ndarray, np.generic)):
        encode_array(value, where, notes, message.array, depth)
    elif isinstance(value, bool):
        message.boolean = value
    elif isinstance(value, int) and -(2**63) <= value < 2**63:
        message.integer = value
    elif isinstance(value, int) and value.bit_length() < 3 * MAX_DIGITS:
        message.big_integer = str(int(value))
    elif isinstance(value, float):
        message.number = value
    elif isinstance(value, str):
        value.encode("utf-8")  # lone surrogates raise UnicodeError here; each version of Protobuf raises its own error
        message.text = value
    elif isinstance(value, (bytes, bytearray)):
        message.data = bytes(value)
    elif isinstance(value, complex):
        message.complex.real, message.complex.imaginary = value.real, value.imag
    elif isinstance(value, Mapping):
        encode_dict(value, where, notes, message.dict, depth)
    elif isinstance(value, (list, tuple, set, frozenset)):
        kind = next(kind for kind in (list, tuple, set, frozenset) if isinstance(value, kind))
        encode_items(value, where, notes, getattr(message, kind.__name__), depth)
    else:
        raise Refusal(f"{where} is of type {type(value).__name__}, or too large, and cannot be sent")
    return message


def encode_part(value, where, notes, depth, instead):
    """Return the message for a part of a value; with `notes`, None if it cannot be sent."""
    try:
        return encode(value, where, notes, None, depth + 1)
    except (Refusal, UnicodeError) as error:
        if notes is None:
            raise
        note(notes, where, f"{instead} does not travel: {error}")
        return None


def encode_items(items, where, notes, message, depth):
    """Encode items one after the other; those that cannot be sent become None."""
    message.SetInParent()
    for index, item in enumerate(items):
        found = encode_part(item, f"{where}[{index}]", notes, depth, "None stands for what")
        message.items.add().CopyFrom(encode(None) if found is None else found)


def encode_dict(value, where, notes, message, depth):
    """Encode a dict in its order, without items that cannot be sent."""
    message.SetInParent()
    texts = all(isinstance(key, str) for key in value)
    for key, item in value.items():
        place = f"{where}[{key!r}]"
        name = encode_part(key, f"the key of {place}", notes, depth, "left out, for it")
        found = None if name is None else encode_part(item, place, notes, depth, "left out, for it")
        if found is not None:
            (message.keys if texts else message.any_keys).extend([key if texts else name])
            message.values.add().CopyFrom(found)


def encode_array(value, where, notes, message, depth):
    """Encode a NumPy array or scalar; arrays of objects are encoded item by item."""
    array = np.asarray(value)
    message.is_scalar = isinstance(value, np.generic)
    message.shape.extend(array.shape)
    if array.dtype == object:
        message.dtype = "object"
        encode_items(array.ravel().tolist(), where, notes, message, depth)
    elif array.dtype.kind in "biufcUSMm" and not isinstance(value, np.ma.MaskedArray):
        plain = array.astype(array.dtype.newbyteorder("<"), copy=False)
        message.dtype, message.data = plain.dtype.str, plain.tobytes()
    else:
        raise Refusal(f"{where} is an array of {array.dtype}, which cannot be sent")


def decode(message, depth=0):
    """Return the value in a message."""
    kind = message.WhichOneof("payload")
    if kind is None or depth > MAX_DEPTH:
        raise Refusal(f"expected a value of at most {MAX_DEPTH} levels, got {kind or 'an empty message'}")
    found = getattr(message, kind)
    if kind in ("list", "tuple", "set", "frozenset"):
        make = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind]
        return make([decode(item, depth + 1) for item in found.items])
    if kind == "dict":
        keys = list(found.keys) or [decode(key, depth + 1) for key in found.any_keys]
        return dict(zip(keys, [decode(item, depth + 1) for item in found.values]))
    if kind == "array":
        return decode_array(found, depth)
    if kind == "big_integer":
        return parse_integer(found)
    return None if kind == "none" else complex(found.real, found.imaginary) if kind == "complex" else found


def decode_array(message, depth):
    """Return an array, or a NumPy scalar."""
    if message.dtype == "object":
        array = np.empty(len(message.items), object)
        for index, item in enumerate(message.items):
            array[index] = decode(item, depth + 1)
    elif PLAIN_DTYPE.match(message.dtype):  # NumPy would evaluate other text
        dtype = np.dtype(message.dtype)
        array = np.frombuffer(message.data, dtype).copy() if message.data else np.empty(0, dtype)
    else:
        raise Refusal(f"an array of the dtype {message.dtype!r:.40} cannot be read")
    array = array.reshape([int(size) for size in message.shape])
    return array[()] if message.is_scalar else array


def parse_integer(text):
    """Parse a decimal integer, which is the form of integers beyond 64 bits."""
    if not isinstance(text, str) or not re.match(rf"-?[0-9]{{1,{MAX_DIGITS}}}$", text):
        raise Refusal(f"expected an integer in decimal, got {text!r:.40}")
    return int(text)


def read_dict(tensor, name):
    """Return the dict, or None, that a tensor of bytes contains as a value."""
    if tensor.WhichOneof("payload") != "uint8s":
        raise Refusal(f"{name}: expected uint8 bytes that hold a value")
    try:
        found = decode(pb.Value.FromString(tensor.uint8s.array))
    except (message.DecodeError, TypeError, ValueError) as error:
        raise Refusal(f"{name}: the bytes hold no value: {error}") from error
    if not isinstance(found, (dict, type(None))):
        raise Refusal(f"expected {name} to be a dict, got {type(found).__name__}")
    return found


# Spaces
# ======
# A space is known by the names of its classes, so it may be one of `gym`, of Gymnasium, or of an engine of your own.

SERVED = ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Text", "Dict", "Tuple")


def kind_of(space, where="the space"):
    """Return the kind of a space; refuse unsupported ones by name."""
    names = [kind.__name__ for kind in type(space).__mro__]
    kind = next((name for name in names if name in SERVED), None)
    # A class of one's own whose samples are strings, such as MiniGrid's MissionSpace; but not a Sequence of strings.
    if kind is None and "Sequence" not in names and np.dtype(getattr(space, "dtype", None)).kind == "U":
        return "Text"
    if kind is None:
        text = f"{where} is a {names[0]}, which this server does not serve; it serves {', '.join(SERVED)}"
        raise Refusal(f"{text}: wrap the environment so that it has one of these", FAILED_PRECONDITION)
    return kind


def space_json(space, where="the space"):
    """Return a space as data for JSON, from which the client makes an equal space."""
    kind = kind_of(space, where)
    if kind == "Dict":
        items = [[key_json(key), space_json(item, f"{where}[{key!r}]")] for key, item in space.spaces.items()]
        return {"type": kind, "sort_keys": bool(getattr(space, "sort_keys", True)), "spaces": items}
    if kind == "Tuple":
        return {"type": kind, "spaces": [space_json(item, f"{where}[{key}]") for key, item in enumerate(space.spaces)]}
    if kind == "MultiBinary":
        return {"type": kind, "n": np.asarray(space.n).tolist()}
    if kind == "Text":
        least, most = getattr(space, "min_length", 0), getattr(space, "max_length", 4096)
        characters = "".join(getattr(space, "character_list", string.printable))
        return {"type": kind, "min_length": int(least), "max_length": int(most), "charset": characters}
    found = {"type": kind, "dtype": np.dtype(space.dtype).name}
    if kind == "Discrete":
        return {**found, "n": int(space.n), "start": int(start_of(space))}
    found["shape"] = [int(size) for size in space.shape]
    if kind == "MultiDiscrete":
        return {**found, "nvec": numbers(space.nvec), "start": numbers(start_of(space))}
    bounds = {"low": space.low, "high": space.high}
    bounds["bounded_below"] = getattr(space, "bounded_below", space.low > -np.inf)
    bounds["bounded_above"] = getattr(space, "bounded_above", space.high < np.inf)
    return {**found, **{name: numbers(bound) for name, bound in bounds.items()}}


def start_of(space):
    """Return the lowest element of a Discrete or MultiDiscrete; older versions lack `start`."""
    start = getattr(space, "start", None)
    return np.zeros_like(getattr(space, "nvec", 0)) if start is None else np.asarray(start)


def numbers(array):
    """Return one number if all are equal, otherwise the flat list; infinities are texts, because JSON has none."""
    found = [str(item) if item in (np.inf, -np.inf) else item for item in np.ravel(array).tolist()]
    return found[0] if found and found.count(found[0]) == len(found) else found


def key_json(key):
    """Return a key of a Dict in a form for JSON."""
    if not isinstance(key, (str, int, np.integer)):
        raise Refusal(f"expected texts or integers as keys of a Dict, got {key!r}", FAILED_PRECONDITION)
    return str(key) if isinstance(key, str) else {"int": int(key)}


class SpaceLeaf:
    """One tensor of a sample: its part of the space, and the keys that lead to it."""

    def __init__(self, name, space, path, lanes):
        self.name, self.space, self.path, self.kind = name, space, path, kind_of(space, name)
        self.dtype = np.dtype(object if self.kind == "Text" else space.dtype)
        self.shape = () if self.kind in ("Text", "Discrete") else tuple(space.shape)
        if self.kind == "Box":
            low, high = space.low, space.high
        elif self.kind in ("Discrete", "MultiDiscrete"):
            low = start_of(space)
            high = low + (np.asarray(space.n if self.kind == "Discrete" else space.nvec) - 1)
        else:
            low, high = np.int8(0), np.int8(1)
        self.spec = Field(name, self.shape, self.dtype, low, high, lanes)

    def pack(self, sample, notes):
        """Return this part of an observation as an array; add a note for the client if its type is not the space's."""
        try:
            for key in self.path:
                sample = sample[key]
            # As objects: an array of `<U5` would lose zeros at the end of a text.
            is_text = self.kind == "Text" and isinstance(sample, str)
            array = np.array(sample, object) if is_text else cast(sample, self.dtype, self.kind != "Discrete")
            if array.shape != self.shape:
                raise Refusal(f"expected the shape {self.shape}, got {array.shape}")
        except (Refusal, LookupError, TypeError, ValueError) as error:
            text = f"the environment's observation is not of its observation_space: {self.name!r}: {error}"
            raise Refusal(text, INTERNAL) from error
        if self.shape and getattr(sample, "dtype", None) != array.dtype:
            got = getattr(sample, "dtype", type(sample).__name__)
            text = f"the environment's {self.name!r} is of type {got}, and comes as an array of {array.dtype}"
            note(notes, self.name, f"{text}, as its space says")
        return array.astype(self.spec.dtype, copy=False)

    def unpack(self, array):
        """Return the part of an action that an array contains."""
        part = np.array(cast(array, self.dtype, rounding=True))
        if self.kind == "Text" and not self.space.contains(part[()]):
            raise Refusal(f"{self.name!r}: expected an element of {self.space}, got {part[()]!r:.80}")
        return part[()] if self.kind in ("Text", "Discrete") else part


def leaves_of(space, name, lanes, path=()):
    """Return the leaves of a space; each level of a Dict or Tuple appends a dot and its key to the name."""
    kind, found = kind_of(space, name), []
    if kind not in ("Dict", "Tuple"):
        return [SpaceLeaf(name, space, path, lanes)]
    for index, (key, item) in enumerate(space.spaces.items() if kind == "Dict" else enumerate(space.spaces)):
        # A key may itself have dots, or be empty: `a.b` becomes `a%2Eb`, so that no two leaves have one name.
        label = key.replace("%", "%25").replace(".", "%2E") or "%_" if isinstance(key, str) else f"%[{index}]"
        found += leaves_of(item, f"{name}.{label if kind == 'Dict' else key}", lanes, (*path, key))
    return found


def assemble(space, parts):
    """Return a sample of a space from an iterator of its parts in order."""
    kind = kind_of(space)
    if kind == "Dict":
        return {key: assemble(item, parts) for key, item in space.spaces.items()}
    return tuple(assemble(item, parts) for item in space.spaces) if kind == "Tuple" else next(parts)


def form_of(space, sample):
    """Return what the space does not say about a sample: the order of a Dict's keys, and which Discrete is a plain int.

    None if nothing differs from the space. Without it, a client could not tell whether the environment returned 3 or
    np.int64(3), and its `type(observation)` would differ from a local environment's.
    """
    kind = kind_of(space)
    if kind == "Discrete":
        return {int: "int", bool: "bool"}.get(type(sample))
    if kind == "Dict":
        keys = list(space.spaces)
        order = [keys.index(key) for key in sample if key in space.spaces]
        parts = [form_of(item, sample[key]) for key, item in space.spaces.items()]
        return [order, parts] if order != sorted(order) or any(parts) else None
    parts = [form_of(item, part) for item, part in zip(space.spaces, sample)] if kind == "Tuple" else []
    return [None, parts] if any(parts) else None


# The simulator
# =============
# Until `gym` 0.25 there were a method `seed`, a `reset` without an info, a `step` of four values, and a `render` that
# takes the mode. Which of them an environment has is seen from its methods and results, not from the version of the
# library: an environment may be older than the library that made it, and an engine of your own has no library.


def calling(where, function, *args, **kwargs):
    """Call the environment; turn an exception into a refusal with its traceback."""
    try:
        return function(*args, **kwargs)
    except Refusal:
        raise
    except (Exception, SystemExit) as error:
        text = f"the environment raised {type(error).__name__} in {where}: {error}\n{traceback.format_exc()}"
        # It may quote a client's options: without what a terminal would obey.
        log.error("%s", "".join(each if each in "\n\t" or each.isprintable() else "?" for each in text[:65536]))
        raise Refusal(text + remedy_of(error, where), INTERNAL) from error


def remedy_of(error, where):
    """Return what to do about an error that an environment raised, or "".

    Gym and Gymnasium have their own errors for missing packages, such as pygame, that an environment or its pictures
    need.
    """
    while error is not None and not (isinstance(error, ImportError) and error.name):
        error = error.__cause__ or error.__context__
    if error is None:
        what = "its reset()" if where == "reset" else "the environment, or call reset() to begin a new episode"
        return f"Fix {what}."
    return f"The server's Python has no module {error.name!r}: install the package that has it there."


def takes(function, keyword, any_keyword=True):
    """Return True if a function is known to accept a keyword; with `any_keyword`, `**kwargs` counts."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):  # functions of binary modules may have no signature, and None is no function
        return False
    return keyword in found or (any_keyword and any(each.kind is each.VAR_KEYWORD for each in found.values()))


class Simulator:
    """One environment of any version, with the interface of today's Gymnasium.

    Args:
        env: The environment, owned by this object from here on.
        render_mode: The render mode; None: that of the environment.
    """

    def __init__(self, env, render_mode=None):
        self.env, layers = env, [env]
        while any(kind.__name__ == "Wrapper" for kind in type(layers[-1]).__mro__):
            layers.append(layers[-1].env)
        # A wrapper's `reset(**kwargs)` takes any keyword, and hands it to an environment that may not; one with
        # `reset()` hands nothing on. So a keyword is given only where every layer takes it.
        self._reset_takes = [name for name in ("seed", "options") if all(takes(layer.reset, name) for layer in layers)]
        self.metadata = dict(getattr(env, "metadata", None) or {})
        self.metadata.setdefault("render_modes", list(self.metadata.get("render.modes", [])))  # `gym` before 0.22
        self.render_mode = getattr(env, "render_mode", None)
        # The old `render(mode)` is told at each call, so whatever mode the client asks for will do.
        self._render_takes_mode = self.render_mode is None and takes(getattr(layers[-1], "render", None), "mode", False)
        if self._render_takes_mode:
            self.render_mode = render_mode or ("rgb_array" if "rgb_array" in self.metadata["render_modes"] else None)
        if render_mode not in (None, self.render_mode):
            calling("close", env.close)
            raise Refusal(f"expected an environment that takes render_mode={render_mode!r}, got {self.render_mode!r}")

    def reset(self, seed=None, options=None):
        """Begin an episode; return the first observation and the info."""
        given = {name: value for name, value in (("seed", seed), ("options", options)) if value is not None}
        if "seed" in given and "seed" not in self._reset_takes:
            calling("seed", self.env.seed, given.pop("seed"))
        # Options that `reset` does not take are given all the same: its TypeError tells the client, who asked for what
        # cannot be. Empty ones ask for nothing.
        if not options and "options" not in self._reset_takes:
            given.pop("options", None)
        result = calling("reset", self.env.reset, **given)
        has_info = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)
        # An old environment's observation may itself be a tuple of something and a dict.
        if has_info and kind_of(self.env.observation_space) == "Tuple":
            has_info = not self.env.observation_space.contains(result)
        return result if has_info else (result, {})

    def step(self, action):
        """Return observation, reward, terminated, truncated and info."""
        result = calling("step", self.env.step, action)
        try:
            observation, reward, terminated, *truncated, info = result
            reward, terminated = float(np.asarray(reward).item()), bool(terminated)
        except (TypeError, ValueError) as error:
            text = f"expected four or five values of the environment's step, the second a number: {error}"
            raise Refusal(f"{text}; got {result!r:.200}", INTERNAL) from error
        if truncated:
            return observation, reward, terminated, bool(truncated[0]), info
        # `done` stands for both ways of ending. The wrapper TimeLimit says which it was: True at the limit, False where
        # the episode ended by itself in that very step.
        is_cut = terminated and bool(info.get("TimeLimit.truncated", False))
        return observation, reward, terminated and not is_cut, is_cut, info

    def render(self):
        """Return the current frame; None if there is no render mode."""
        if self.render_mode is None:
            return None
        return calling("render", self.env.render, **({"mode": self.render_mode} if self._render_takes_mode else {}))


def find_maker(target):
    """Return a function that makes the environment named on a command line, and the environment's id or "".

    An id must be known to `gymnasium` or `gym`; MODULE:ID imports a module first; MODULE:NAME is a function or class.
    """
    module_name, _, name = target.rpartition(":")
    sys.path.append(os.getcwd())  # Python itself puts only the folder of this file there
    found = importlib.import_module(module_name) if module_name else None
    for part in name.split("."):
        found = getattr(found, part, None)
    if callable(found):
        return maker_of(found, takes(found, "render_mode")), ""
    problems = []
    for library_name in sorted(("gymnasium", "gym"), key=lambda library: library != module_name):
        try:
            library = importlib.import_module(library_name)
            library.spec(name)
        except Exception as error:  # each version has its own for an unknown id
            problems.append(f"{library_name}: {error}")
            continue
        # Before 0.26 `gym.make` hands a render mode on to the environment, and older environments take none.
        old = library_name == "gym" and [int(part) for part in library.__version__.split(".")[:2]] < [0, 26]
        return maker_of(library.make, not old, name), name
    raise SystemExit(f"no environment {target!r}; MODULE:ID imports what registers it. " + "; ".join(problems))


def maker_of(function, takes_mode, *args):
    """Return a function that makes a Simulator from the result of another function, which may accept a render mode."""

    def make(render_mode=None, **kwargs):
        if render_mode is not None and takes_mode:
            kwargs["render_mode"] = render_mode
        return Simulator(function(*args, **kwargs), render_mode)

    return make


# The world
# =========

NOTHING = (None, None, None)  # seeds, options and mask of a reset that gives none


class StandaloneWorld:
    """One environment, or lanes that one message steps one after the other. One connection at a time plays.

    For a single environment, the end of the episode ends the protocol's sequence. Lanes end at different times, so
    their sequence continues: the flags say which lane's episode ended, and that lane begins its next one in the next
    Step, whatever its action (Gymnasium's NEXT_STEP).

    Args:
        name: The world's name.
        make: Makes a Simulator.
        lanes: The number of lanes; None: a single environment.
    """

    def __init__(self, name, make, lanes):
        # `waiting`: the Futures of ResetWorld requests, which wait until the player was told.
        self.name, self.lanes, self.envs, self.waiting = name, lanes, [], []
        self.creator, self.ends_with_creator = None, False  # `StandaloneSession.close` explains it
        self.destroyed, count, batch = False, lanes or 1, () if lanes is None else (lanes,)
        try:
            for _ in range(count):
                # One by one: if the third fails, the first two are closed.
                self.envs.append(calling("its construction", make))
            self.space, self.action_space = self.envs[0].env.observation_space, self.envs[0].env.action_space
            self.leaves = leaves_of(self.space, "observation", lanes)
            self.action_leaves = leaves_of(self.action_space, "action", lanes)
            spaces = (("observation_space", self.space), ("action_space", self.action_space))
            self.texts = {f"world.{name}": json.dumps(space_json(space, name)) for name, space in spaces}
        except BaseException:
            self.close()
            raise
        # UIDs are chosen by the server; clients learn them from the specs. The protocol reserves none.
        flags = [Field("reward", batch, np.float64), Field("discount", batch, np.float64, np.float64(0), np.float64(1))]
        flags += [Field(ending, batch, np.bool_) for ending in ("terminated", "truncated")]
        flags.append(Field("info", (-1,), np.uint8))
        self.published = dict(enumerate([leaf.spec for leaf in self.leaves] + flags, start=1))
        self.actions = dict(enumerate([leaf.spec for leaf in self.action_leaves], start=1))
        self.samples, self.infos = [None] * count, [{}] * count
        self.rewards, self.ends, self.cuts = np.zeros(count), np.zeros(count, np.bool_), np.zeros(count, np.bool_)
        self.enter(None)

    def enter(self, player, gymnasium=True):
        """Make a session the player (or None); settings and messages for the previous player are dropped.

        Without `gymnasium`, the info and the flags are hidden: a client written for dm_env would treat them as
        observations of the environment, and gets the state with each Step. Lanes keep their flags, the only sign of an
        end in a world that stays RUNNING.
        """
        hidden = () if gymnasium else ("info",) if self.lanes else ("info", "discount", "terminated", "truncated")
        self.observations = {uid: spec for uid, spec in self.published.items() if spec.name not in hidden}
        self.player, self.notes, self.told, self.form, self.idle_since = player, {}, 0, None, time.monotonic()
        if player is None:
            self.answer_waiting()
            self.pending = self.tried = NOTHING

    def specs(self):
        """Return the specs as a message."""
        found = pb.Specs()
        for entries, specs in ((found.actions, self.actions), (found.observations, self.observations)):
            entries.extend([pb.SpecEntry(key=uid, value=spec.message()) for uid, spec in specs.items()])
        return found

    def read_settings(self, settings):
        """Return the seeds, the options and the mask in the settings of a reset."""
        known = ("seed", "options") if self.lanes is None else ("seed", "options", "reset_mask")
        refuse_unknown(settings, known, "Reset")
        seeds = self._read_seeds(unpack(settings["seed"], "seed")) if "seed" in settings else None
        options = read_dict(settings["options"], "options") if "options" in settings else None
        mask = unpack(settings["reset_mask"], "reset_mask") if "reset_mask" in settings else None
        if mask is not None and (mask.shape != (self.lanes,) or mask.dtype != np.bool_ or not mask.any()):
            raise Refusal(f"expected a reset_mask of {self.lanes} bools, one of them True, got {mask!r:.80}")
        return seeds, options, mask

    def _read_seeds(self, array):
        """Return one seed per lane: the given one plus the lane's number, or each lane's own; None for -1."""
        items = [parse_integer(item) if array.dtype == object else item for item in array.ravel().tolist()]
        if array.shape == () and type(items[0]) is int and items[0] >= 0:
            return [items[0] + lane for lane in range(len(self.envs))]
        if array.shape != (self.lanes,) or not all(type(item) is int and item >= -1 for item in items):
            raise Refusal(f"expected an integer of 0 or more as seed, in lanes also one for each, got {array!r:.80}")
        return [None if item == -1 else item for item in items]

    def begin(self):
        """Reset the environment, or the lanes that the mask selects, with the pending settings."""
        seeds, options, mask = self.tried = self.pending
        self.infos = [{}] * len(self.envs)
        for lane in range(len(self.envs)):
            if mask is None or mask[lane] or self.samples[lane] is None:
                self._reset_lane(lane, None if seeds is None else seeds[lane], options)
        self.pending = NOTHING

    def _reset_lane(self, lane, seed=None, options=None):
        self.samples[lane], self.infos[lane] = self.envs[lane].reset(seed, options)
        self.rewards[lane], self.ends[lane], self.cuts[lane] = 0.0, False, False

    def step(self, arrays):
        """Step with the arrays of the actions by UID; return the new state."""
        for uid, spec in self.actions.items():
            if uid not in arrays:
                raise Refusal(f"the Step lacks the action {spec.name!r} (UID {uid})")
        actions = []
        for lane in range(len(self.envs)):  # all are read before any lane is stepped
            parts = [arrays[uid] if self.lanes is None else arrays[uid][lane, ...] for uid in self.actions]
            actions.append(assemble(self.action_space, map(SpaceLeaf.unpack, self.action_leaves, parts)))
        for lane, env in enumerate(self.envs):
            if self.lanes is not None and (self.ends[lane] or self.cuts[lane]):
                self._reset_lane(lane)
                continue
            found = env.step(actions[lane])
            self.samples[lane], self.rewards[lane], self.ends[lane], self.cuts[lane], self.infos[lane] = found
        if self.lanes is not None:
            return RUNNING
        return TERMINATED if self.ends[0] else INTERRUPTED if self.cuts[0] else RUNNING

    def interrupt(self):
        """End the sequence by truncation, and repeat the last observations: no action was applied."""
        self.rewards[:], self.cuts[:], self.infos = 0.0, True, [{}] * len(self.envs)
        return INTERRUPTED

    def observe(self, uid):
        """Return the array of an observation of the last step."""
        flags = {"reward": self.rewards, "terminated": self.ends, "truncated": self.cuts, "discount": 1.0 - self.ends}
        if uid <= len(self.leaves):
            found = [self.leaves[uid - 1].pack(sample, self.notes) for sample in self.samples]
        elif self.observations[uid].name == "info":
            return np.frombuffer(self._info(), np.uint8)
        else:
            found = list(flags[self.observations[uid].name])
        return found[0] if self.lanes is None else np.stack(found)

    def _info(self):
        """Return the bytes of the info, or of a list of the lanes' infos, with the notes for the client."""
        single = self.lanes is None
        message = encode(self.infos[0] if single else self.infos if any(self.infos) else {}, "info", self.notes)
        form = form_of(self.space, self.samples[0]) if single else None
        if form != self.form:
            self.form = form
            encode(form, "form", None, message.form)
        message.notes.extend(list(self.notes.values())[self.told :])
        self.told = len(self.notes)
        return message.SerializeToString()

    def answer_waiting(self, was_reset=True):
        """Answer the ResetWorld requests that waited for the player."""
        waiting, self.waiting = self.waiting, []
        for order in waiting:
            self.pending = order.pending
            order.set_result(was_reset)

    def close(self):
        """Close all environments, even if closing one fails."""
        self.destroyed, envs, self.envs = True, self.envs, []
        self.answer_waiting(False)
        for simulator in envs:
            with contextlib.suppress(Refusal):  # it was logged
                calling("close", simulator.env.close)


def refuse_unknown(settings, known, request):
    """Refuse settings that are not in `known`."""
    unknown = ", ".join(sorted(name for name in settings if name not in known))
    if unknown:
        raise Refusal(f"unknown {request} settings {unknown}; the settings here are: {', '.join(known) or 'none'}")


# Properties
# ==========


def properties_of(server, session):
    """Return the readable properties by key: texts, numbers, values, and functions for those that take time."""
    found = {
        "server.name": "serve_env.py",
        "server.version": VERSION,
        "server.environments": [server.env_id] if server.env_id else [],
        "server.settings": [*server.SETTINGS, "kwargs.NAME"],
        "server.worlds": len(server.worlds),
        "server.limits.max_connections": server.limits.max_connections,
        "server.limits.max_worlds": server.limits.max_worlds,
    }
    world = session.world
    if world is not None and not world.destroyed:
        first, spec = world.envs[0], getattr(world.envs[0].env, "spec", None)
        facts = ("id", "reward_threshold", "nondeterministic", "max_episode_steps", "order_enforce", "kwargs")
        found["world.name"], found["world.env_id"] = world.name, server.env_id
        found["world.num_envs"] = world.lanes or 0
        found.update(world.texts)  # the spaces
        found["world.reward_space"] = ""  # rewards are numbers
        found["world.metadata"], found["world.render_mode"] = first.metadata, first.render_mode or ""
        found["world.spec"] = spec and {name: getattr(spec, name) for name in facts if hasattr(spec, name)}
        found["world.frame"] = lambda: frames_of(world)
    return found


def frames_of(world):
    """Return the frames of the lanes."""
    if any(sample is None for sample in world.samples):
        raise Refusal("there is no frame before the first Step", FAILED_PRECONDITION)
    return [simulator.render() for simulator in world.envs]


def answer_property(server, session, request):
    """Answer a request to read or list a property; none can be written."""
    kind = request.WhichOneof("payload")
    if kind is None:
        raise Refusal("expected a property request to read or list, got an empty one")
    found, key, response = properties_of(server, session), getattr(request, kind).key, pb.PropertyResponse()
    prefix = key + "." if key else ""
    children = {prefix + path[len(prefix) :].split(".")[0]: None for path in found if path.startswith(prefix)}
    if key not in found and not children:
        raise Refusal(f"there is no property {key!r}; there are {', '.join(found)}", NOT_FOUND)
    if kind == "write_property" or (key in found) == (kind == "list_property"):
        raise Refusal(f"the property {key!r} cannot be {kind.partition('_')[0]}", PERMISSION_DENIED)
    if kind == "read_property":
        value = found[key]() if callable(found[key]) else found[key]
        if not isinstance(value, (int, str)):
            value = np.frombuffer(encode(value, key, {}).SerializeToString(), np.uint8)
        response.read_property.value.CopyFrom(pack(value))
    for child in children if kind == "list_property" else ():
        shape, dtype = {str: ((), object), int: ((), np.int64)}.get(type(found.get(child, "")), ((-1,), np.uint8))
        entry = response.list_property.values.add(is_readable=child in found, is_listable=child not in found)
        entry.spec.CopyFrom(Field(child, shape, dtype).message())
    return response.SerializeToString()


# The session
# ===========
# A connection is one stream of requests. Each gets one answer, in order: a message of the same kind, or an error. The
# connection is in no world, or has joined one; there, a sequence (an episode) is running or not:
#
#     state       JoinWorld    Step                                              Reset      LeaveWorld
#     no world    -> joined    refused                                           refused    -> no world
#     joined      refused      resets the environment -> running                 -> joined  -> no world
#     running     refused      steps it -> running, or -> joined at the end      -> joined  -> no world
#
# So it is a Step that resets the environment: the first one, whose actions are ignored, answers with the observations
# that `reset` gave. Reset only ends the sequence, and keeps the seed and options for that Step. CreateWorld,
# DestroyWorld, ResetWorld and questions for properties are allowed in every state. A request is checked as a whole
# before it changes anything.


class StandaloneSession:
    """The requests of one connection. Its state is only its world, and whether a sequence runs or it has ended.

    Args:
        server: The StandaloneServer.
        is_bridge: True if the client is Gymnasium Bridge's, which uses the info and the flags.
    """

    def __init__(self, server, is_bridge):
        self.server, self.is_bridge, self.world, self.running, self.closed = server, is_bridge, None, False, False
        server.connections += 1  # until `close`

    def answer(self, data):
        """Return the response to a request's bytes; or a Future to wait for, and then to pass to `answer_late`."""
        try:
            request, response = pb.EnvironmentRequest.FromString(data), pb.EnvironmentResponse()
            kind = request.WhichOneof("payload")
            if kind is None or self.closed:
                raise Refusal("expected a request of one of the protocol's kinds, on a connection that is open")
            getattr(response, kind).SetInParent()  # an empty answer has a kind, too
            order = getattr(self, "on_" + kind)(getattr(request, kind), getattr(response, kind))
            return response.SerializeToString() if order is None else order
        except (message.DecodeError, Refusal) as error:  # bytes that are no request have no code of their own
            return refusal(error)
        except Exception as error:  # whatever went wrong, the request is answered, and with the cause
            log.exception("the server failed")
            return refusal(Refusal(f"the server failed: {error!r}\n{traceback.format_exc()}", INTERNAL))

    def require_world(self):
        """Return the world of this connection; refuse if there is none."""
        if self.world is None or self.world.destroyed:
            why = "this connection is in no world" if self.world is None else "the world was destroyed; send LeaveWorld"
            raise Refusal(f"{why}; send JoinWorld first", FAILED_PRECONDITION)
        return self.world

    def on_create_world(self, request, response):
        """Create a world, for any client to join."""
        world = self.server.create_world(settings_of(request))
        world.creator, world.ends_with_creator, response.world_name = self, self.is_bridge, world.name

    def on_join_world(self, request, response):
        """Join a world that has no player."""
        if self.world is not None:
            raise Refusal("this connection is in a world already; send LeaveWorld first", FAILED_PRECONDITION)
        world, settings = self.server.find(request.world_name), settings_of(request)
        refuse_unknown(settings, ("gymnasium",), "JoinWorld")
        gymnasium = unpack(settings["gymnasium"], "gymnasium") if settings else np.array(self.is_bridge)
        if gymnasium.dtype != np.bool_ or gymnasium.shape:
            raise Refusal(f"expected the setting gymnasium to be a bool, got {gymnasium!r:.80}")
        if world.player is not None:
            text = "the world that was asked for is full: it has 1 agent of at most 1; wait until it leaves, or create"
            raise Refusal(f"{text} another world, if the server has room (its limit is max_worlds)", RESOURCE_EXHAUSTED)
        self.server.require_room(world.name)
        world.enter(self, bool(gymnasium))
        self.world, world.ends_with_creator = world, world.ends_with_creator or world.creator is self
        response.specs.CopyFrom(world.specs())

    def on_step(self, request, response):
        """Begin a sequence and ignore the actions; in a running sequence, step."""
        world = self.require_world()
        wanted = list(dict.fromkeys(request.requested_observations))
        refuse_unknown_uids(wanted, world.observations, "observation")
        if not self.running:
            world.begin()
            response.state = RUNNING
        elif world.waiting:  # another connection has reset the world: this one is told before the next episode begins
            response.state = world.interrupt()
        else:
            refuse_unknown_uids([entry.key for entry in request.actions], world.actions, "action")
            arrays = {entry.key: world.actions[entry.key].read(entry.value) for entry in request.actions}
            response.state = world.step(arrays)
        self.running = response.state == RUNNING
        if not self.running:
            world.answer_waiting()
        for uid in wanted:
            pack(world.observe(uid), response.observations.add(key=uid).value)

    def on_reset(self, request, response):
        """End the sequence; the next Step resets the environment, with these settings."""
        world, settings = self.require_world(), settings_of(request)
        pending = world.read_settings(settings)
        world.answer_waiting()
        # Without settings and between sequences, an earlier Reset's seed still waits for its Step, unless that failed.
        if settings or self.running or world.pending is world.tried:
            world.pending = pending
        self.running = False
        response.specs.CopyFrom(world.specs())

    def on_reset_world(self, request, response):
        """End the sequence of a world's player; from another connection, wait until the player was told."""
        world = self.server.find(request.world_name)
        pending = world.read_settings(settings_of(request))
        if world.player not in (None, self) and world.player.running:
            order = futures.Future()
            order.world, order.pending = world, pending
            world.waiting.append(order)
            return order
        if world.player is self:
            self.running = False
            world.answer_waiting()
        world.pending = pending

    def answer_late(self, order):
        """Return the response to a ResetWorld that has waited."""
        world = order.world
        if not order.done():
            world.waiting.remove(order)
            text = f"ResetWorld of {world.name!r}: its agent did not Step in time, so nothing was reset"
            return refusal(Refusal(f"{text}; let it Step once, or leave", DEADLINE_EXCEEDED))
        if not order.result():
            return refusal(Refusal(f"the world {world.name!r} was destroyed while ResetWorld waited", NOT_FOUND))
        return pb.EnvironmentResponse(reset_world=pb.Empty()).SerializeToString()

    def on_leave_world(self, request=None, response=None):
        """Leave the world; do nothing if no world is joined."""
        world, self.world, self.running = self.world, None, False
        if world is not None:
            world.enter(None)

    def on_destroy_world(self, request, response):
        """End a world; its player's requests are refused from then on."""
        world = self.server.find(request.world_name, make=False)
        if world is self.world:
            raise Refusal(f"this connection is in the world {world.name!r}; send LeaveWorld first", FAILED_PRECONDITION)
        self.server.destroy(world)

    def on_extension(self, request, response):
        """Answer a request for a property."""
        if request.type_url != PROPERTY_URL + "Request":
            raise Refusal(f"unknown extension {request.type_url!r}; there is {PROPERTY_URL}Request", UNIMPLEMENTED)
        response.value = answer_property(self.server, self, pb.PropertyRequest.FromString(request.value))
        response.type_url = PROPERTY_URL + "Response"

    def close(self):
        """Leave the world after the end of the connection, and destroy the worlds that belong to it.

        A world belongs to the connection that created it if the client is Gymnasium Bridge, which creates one for each
        environment, or if its creator joined it. Other clients may create worlds on one connection and use them on
        others.
        """
        self.closed = True  # its thread may still hold a request to join a world, which nobody would leave
        self.on_leave_world()
        worlds = self.server.worlds.values()
        for world in [one for one in worlds if one.creator is self and one.ends_with_creator and one.player is None]:
            self.server.destroy(world)
        self.server.connections -= 1


def refuse_unknown_uids(uids, specs, what):
    """Refuse UIDs that are not in `specs`."""
    for uid in uids:
        if uid not in specs:
            known = ", ".join(f"{number} ({spec.name})" for number, spec in specs.items())
            raise Refusal(f"unknown {what} UID {uid}; there are {known}")


def settings_of(request):
    """Return the settings of a request by name."""
    return {entry.key: entry.value for entry in request.settings}


def refusal(error):
    """Return the bytes of an error response."""
    code = getattr(error, "code", INVALID_ARGUMENT)
    return pb.EnvironmentResponse(error=pb.Status(code=code, message=str(error))).SerializeToString()


# The server
# ==========


class MainThread:
    """Runs functions for other threads, one at a time, in the thread that calls `work`."""

    def __init__(self):
        self._jobs, self._ended, self._calling, self._interrupted = queue.Queue(), False, False, False

    def post(self, function, *args):
        """Queue a function; return a Future of its result."""
        result = futures.Future()
        self._jobs.put((result, function, args))
        if self._ended:
            self.end()
        return result

    def run(self, context, function, *args):
        """Run a function in the main thread and return its result; end the connection if it was not completed."""
        try:
            return self.post(function, *args).result()
        except (Refusal, KeyboardInterrupt) as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "the environment was interrupted")

    def work(self, idle):
        """Run queued functions until a signal, and call `idle` regularly."""
        while not self._interrupted:
            try:
                result, function, args = self._jobs.get(timeout=0.5)  # Windows interrupts no wait that is not short
            except queue.Empty:
                idle()
                continue
            try:
                value = self.call(function, *args)
            except BaseException as error:
                result.set_exception(error)
            else:
                result.set_result(value)

    def call(self, function, *args):
        """Call a function that signals may interrupt."""
        try:
            self._calling = True
            return function(*args)
        finally:
            self._calling = False

    def interrupt(self, *_):
        """Handle a signal. Outside `call`, an exception could lose a result, so the first signal only ends `work`."""
        again, self._interrupted = self._interrupted, True
        if self._calling or again:
            raise KeyboardInterrupt

    def end(self):
        """Refuse further functions."""
        self._ended = True
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()[0].set_exception(Refusal("this server is stopping", UNAVAILABLE))


@dataclasses.dataclass
class StandaloneLimits:
    """The limits of a server: connections and worlds at a time, and seconds.

    `max_worlds` counts the worlds in use by clients, including the default world; 0: only the default world exists. A
    world without a player ends after `idle_timeout`; ResetWorld waits `reset_world_timeout` for the world's player.
    """

    max_connections: int = 64
    max_worlds: int = 64
    idle_timeout: float = 3600.0
    reset_world_timeout: float = 60.0


class StandaloneServer:
    """The worlds of a server, and its connections.

    Args:
        make: Makes a Simulator from keyword arguments.
        env_id: The environment's id; empty if it has none.
        lanes: The number of lanes in each world; 1: a single environment, without lanes.
        kwargs: Arguments of the environment; a client's arguments override them.
        token: The token that clients must send; None: none.
        limits: The limits.
    """

    SETTINGS = ("env_id", "num_envs", "render_mode", "kwargs")
    MAX_LANES = 4096

    def __init__(self, make, env_id="", lanes=1, kwargs=None, token=None, limits=None):
        self.make, self.env_id, self.lanes, self.kwargs, self.token = make, env_id, lanes, kwargs or {}, token
        self.limits = limits or StandaloneLimits()
        self.worlds, self.main, self.connections = {}, MainThread(), 0

    def create_world(self, settings):
        """Make a world with a name that cannot be guessed."""
        return self._make_world("world-" + secrets.token_hex(8), settings)

    def require_room(self, name):
        """Refuse the use of a world, by its name, if it exceeds the limit."""
        # A world that a client made is in use while it is there, and the default one while somebody plays in it.
        used = {key for key, world in self.worlds.items() if key or world.player is not None} | {name}
        if len(used) > max(self.limits.max_worlds, name == ""):
            text = f"this server has max_worlds={self.limits.max_worlds} worlds in use: close one of your environments"
            raise Refusal(f"{text}, wait until another client leaves, or use another server", RESOURCE_EXHAUSTED)

    def find(self, name, make=True):
        """Return a world; the default one, whose name is empty, is made at its first use."""
        if name == "" and make and name not in self.worlds:
            return self._make_world(name, {})
        if name not in self.worlds:
            raise Refusal(f"there is no world {name!r}; create one, or join the one with the empty name", NOT_FOUND)
        return self.worlds[name]

    def destroy(self, world):
        """End a world."""
        self.worlds.pop(world.name).close()

    def destroy_idle(self):
        """End worlds that have had no player for `idle_timeout`."""
        late = time.monotonic() - self.limits.idle_timeout
        for world in [world for world in self.worlds.values() if world.player is None and world.idle_since < late]:
            self.destroy(world)

    def _make_world(self, name, settings):
        self.destroy_idle()  # `work` has no time for it while requests come without a pause
        self.require_room(name)
        plain = [key for key in settings if not key.startswith("kwargs.")]
        refuse_unknown(plain, [*self.SETTINGS, "kwargs.NAME"], "CreateWorld")
        asked = read_dict(settings.pop("kwargs"), "kwargs") if "kwargs" in settings else None
        given = {key: unpack(item, key, () if key in plain else None) for key, item in settings.items()}
        given = {key: array.item() if array.shape == () else array for key, array in given.items()}
        kwargs = {**self.kwargs, **(asked or {}), **{key[7:]: item for key, item in given.items() if key not in plain}}
        wanted, here = given.get("env_id", self.env_id), self.env_id or "one without an id"
        if wanted != self.env_id:
            raise Refusal(f"the environment {wanted!r} is not served here; this server has {here}", NOT_FOUND)
        if given.get("render_mode"):
            kwargs["render_mode"] = given["render_mode"]
        lanes = given.get("num_envs", self.lanes)
        if type(lanes) is not int or not 1 <= lanes <= self.MAX_LANES:
            raise Refusal(f"expected num_envs to be an integer from 1 to {self.MAX_LANES}, got {lanes!r:.80}")
        world = StandaloneWorld(name, lambda: self.make(**kwargs), None if lanes == 1 else lanes)
        return self.worlds.setdefault(name, world)

    def process(self, requests, context):
        """Serve a connection, in a separate thread: one response per request, in order."""
        metadata = dict(context.invocation_metadata())
        shown = re.sub("(?i)^bearer ", "bearer ", str(metadata.get("authorization", "")))
        # Compared in constant time, so that the time of a refusal tells nothing of the token.
        if self.token is not None and not secrets.compare_digest(shown.encode(), f"bearer {self.token}".encode()):
            log.warning("refused %s: no token, or a wrong one", context.peer())
            text = "the token is wrong" if shown else "a token is required, and none was sent"
            context.abort(grpc.StatusCode.UNAUTHENTICATED, f"{text}; pass token=..., or set BRIDGE_TOKEN")
        session = self.main.run(context, self._open, HELLO in metadata)
        if session is None:
            text = f"this server has max_connections={self.limits.max_connections} connections already"
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        if not context.add_callback(lambda: self.main.post(session.close)):  # a client may die while this thread waits
            self.main.post(session.close)
        context.send_initial_metadata(((HELLO, VERSION),))
        for data in requests:
            answer = self.main.run(context, session.answer, data)
            if isinstance(answer, futures.Future):  # this thread waits, and the environments' goes on
                end = time.monotonic() + self.limits.reset_world_timeout
                # A client that has gone keeps the thread no longer than a moment.
                while context.is_active() and not answer.done() and time.monotonic() < end:
                    futures.wait([answer], min(1.0, end - time.monotonic()))
                answer = self.main.run(context, session.answer_late, answer)
            yield answer

    def _open(self, is_bridge):
        return None if self.connections >= self.limits.max_connections else StandaloneSession(self, is_bridge)

    def run(self, host, port, credentials=None, started=lambda address: print(address, flush=True)):
        """Serve until Ctrl-C or SIGTERM; the thread that calls this runs the environments.

        Args:
            host: The address to listen on.
            port: The port; 0: any that is free.
            credentials: Of `grpc.ssl_server_credentials`; None: no TLS.
            started: Called with HOST:PORT when clients can connect.
        """
        options = {
            "grpc.max_receive_message_length": MAX_BYTES,  # the usual 4 MiB are too small for some observations
            "grpc.max_send_message_length": MAX_BYTES,
            "grpc.so_reuseport": 0,  # a port that is taken is an error
            "grpc.http2.min_recv_ping_interval_without_data_ms": 1000,  # clients ask for signs of life
            "grpc.http2.max_ping_strikes": 0,
            "grpc.keepalive_time_ms": 20000,  # and one that vanished is noticed
        }
        # A thread for each connection, and some to refuse those that are too many.
        pool = futures.ThreadPoolExecutor(self.limits.max_connections + 8)
        server = grpc.server(pool, options=list(options.items()))
        handler = grpc.stream_stream_rpc_method_handler(self.process)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),))
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            with contextlib.suppress(ValueError):  # signals reach the main thread alone
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, self.main.interrupt)
            self.main.call(self.find, "")  # an environment that cannot be served is to be known now
            found = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
            if not found or port not in (0, found):  # grpcio takes the rest of a division of one that is too large
                raise RuntimeError(f"the port of {address} is taken, or is no port of 1 to 65535")
            server.start()
            started(f"{address.rpartition(':')[0]}:{found}")
            self.main.work(self.destroy_idle)
        except KeyboardInterrupt:
            pass
        finally:
            self.main.end()
            server.stop(0.5).wait()
            # After the connections: where an environment does not close, a second signal ends the process.
            for world in list(self.worlds.values()):
                self.destroy(world)
            pool.shutdown()


def serve(make, host="127.0.0.1", port=50051, lanes=1, **options):
    """Serve the environment that a function makes, until Ctrl-C or SIGTERM. Use this for an engine of your own.

    Args:
        make: Returns an environment; called with the keyword arguments that a client gives.
        host: The address to listen on.
        port: The port; 0: any that is free.
        lanes: The number of environments that each message steps.
        options: `kwargs`, `token` and `limits` of `StandaloneServer`.
    """
    StandaloneServer(maker_of(make, False), "", lanes, **options).run(host, port)


# The command
# ===========


def read_arguments(arguments):
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description="Serve a Gym or Gymnasium environment over dm_env_rpc until Ctrl-C or SIGTERM.",
        epilog="examples:\n" + __doc__.split("\n\n")[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("env", metavar="ENV_ID", help="an id, MODULE:ID, or MODULE:NAME of a function or class that makes one")
    add("--host", default="127.0.0.1", help="the address to listen on (default: for this machine alone)")
    add("--port", type=int, default=0, help="the port (default: any that is free)")
    add("--num-envs", type=int, default=1, metavar="N", help="so many lanes, which one message steps")
    add("--env-kwargs", nargs="+", default=[], metavar="KEY=VALUE", type=read_pair, help="arguments of the environment")
    add("--token", default=os.environ.get("BRIDGE_TOKEN"), help="what clients must show (default: BRIDGE_TOKEN)")
    add("--token-file", metavar="FILE", type=read_file, help="a file with the token")
    add("--insecure", action="store_true", help="no token, though others reach the port")
    pem = {"metavar": "PEM", "type": read_file}
    add("--tls-certificate", **pem, help="the server's certificate")
    add("--tls-key", **pem, help="its key")
    add("--tls-client-ca", **pem, help="the authority that must have signed the clients' certificates")
    add("--max-connections", type=int, default=64, metavar="N", help="connections at a time (default: 64)")
    add("--max-worlds", type=int, default=64, metavar="N", help="worlds in use at a time (default: 64)")
    options = parser.parse_args(arguments)
    if bool(options.tls_certificate) != bool(options.tls_key) or (options.tls_client_ca and not options.tls_key):
        parser.error("TLS needs both --tls-certificate and --tls-key")
    return options


def read_pair(pair):
    """Return the name and the value of an environment's argument; a value that is not a Python literal is a text."""
    key, equals, value = pair.partition("=")
    if not key.isidentifier() or not equals:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, e.g. gravity=9.8, got {pair!r}")
    with contextlib.suppress(ValueError, SyntaxError):
        return key, ast.literal_eval(value)
    return key, value


def read_file(path):
    """Return the bytes of a file."""
    try:
        return pathlib.Path(path).read_bytes()
    except (OSError, ValueError) as error:  # the path is not shown: somebody may have given the token itself
        raise argparse.ArgumentTypeError(f"expected a file that you may read: {error.args[-1]}") from None


def main(arguments=None):
    """Run the command."""
    options = read_arguments(arguments)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    local = options.host in ("localhost", "::1") or options.host.startswith("127.")
    token = options.token if options.token_file is None else options.token_file.decode("ascii", "replace").strip()
    if options.token_file is not None and not token:
        raise SystemExit("expected a token in the file of --token-file, which is empty")
    asks_for_one = not (token or local or options.insecure or options.tls_client_ca)
    made, credentials = secrets.token_hex(32) if asks_for_one else None, None
    if options.tls_key:
        pair, authority = (options.tls_key, options.tls_certificate), options.tls_client_ca
        credentials = grpc.ssl_server_credentials([pair], authority, authority is not None)
    elif not local:
        log.warning("without TLS, whoever is on the way can read along, and act in the client's place")
    limits, vec = StandaloneLimits(options.max_connections, options.max_worlds), "vec_" if options.num_envs > 1 else ""

    def started(address):
        url = f"{'grpcs' if credentials else 'grpc'}://{address}" + (f"?token={made}" if made else "")
        print(f'{options.env} is served at {url}\nConnect: bridge.make_{vec}remote("{url}"). Ctrl-C stops.', flush=True)

    try:
        made_of = (*find_maker(options.env), options.num_envs, dict(options.env_kwargs))
        StandaloneServer(*made_of, token or made, limits).run(options.host, options.port, credentials, started)
    except (ImportError, Refusal, RuntimeError) as error:
        raise SystemExit(f"{options.env} cannot be served: {error}") from None


if __name__ == "__main__":
    main()
