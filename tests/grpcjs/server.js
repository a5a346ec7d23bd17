// A server of one environment, which refuses a Step that asks for no observation.
const { grpc, Process } = require("./messages");

const specs = {
  actions: { 1: { name: "action", dtype: 4, min: { int32s: { array: [0] } }, max: { int32s: { array: [3] } } } },
  observations: { 1: { name: "position", dtype: 2, shape: [2] }, 2: { name: "reward", dtype: 2 } },
};

function answer(request) {
  switch (request.payload) {
    case "create_world":
      return { create_world: { world_name: "world" } };
    case "join_world":
      return { join_world: { specs } };
    case "step":
      if (!(request.step.requested_observations || []).length) {
        return { error: { code: 3, message: "no observation was requested" } };
      }
      const observations = { 1: { doubles: { array: [1, 2] }, shape: [2] }, 2: { doubles: { array: [0.5] } } };
      return { step: { state: 1, observations } };
    case "reset":
      return { reset: { specs } };
    case "leave_world":
      return { leave_world: {} };
    case "destroy_world":
      return { destroy_world: {} };
    default:
      return { error: { code: 12, message: "unknown request" } };
  }
}

const server = new grpc.Server();
server.addService(
  { Process },
  {
    Process: (call) => {
      call.on("data", (request) => call.write(answer(request)));
      call.on("end", () => call.end());
      call.on("error", () => {});
    },
  },
);
server.bindAsync("127.0.0.1:0", grpc.ServerCredentials.createInsecure(), (error, port) => console.log(port));
