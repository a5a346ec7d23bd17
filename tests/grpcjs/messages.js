// The messages of dm_env_rpc by protobufjs, and its one method.
const fs = require("fs");
const path = require("path");
const protobuf = require("protobufjs");

exports.grpc = require("@grpc/grpc-js");

const root = new protobuf.Root();
root.resolvePath = (origin, target) => target;
protobuf.parse(fs.readFileSync(process.argv[2], "utf8"), root, { keepCase: true });
root.addJSON(protobuf.common.get("google/protobuf/any.proto").nested);
const lookUp = (name) => root.lookupType("gymnasium_bridge." + name);
const encode = (type) => (message) => Buffer.from(type.encode(type.fromObject(message)).finish());
const decode = (type) => (data) => type.toObject(type.decode(data), { longs: Number, oneofs: true });

exports.Process = {
  path: "/dm_env_rpc.v1.Environment/Process",
  requestStream: true,
  responseStream: true,
  requestSerialize: encode(lookUp("EnvironmentRequest")),
  requestDeserialize: decode(lookUp("EnvironmentRequest")),
  responseSerialize: encode(lookUp("EnvironmentResponse")),
  responseDeserialize: decode(lookUp("EnvironmentResponse")),
};
