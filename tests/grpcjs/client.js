// Plays two steps, and prints the kinds of the answers.
const { grpc, Process } = require("./messages");

const client = new grpc.Client(`127.0.0.1:${process.argv[3]}`, grpc.credentials.createInsecure());
const call = client.makeBidiStreamRequest(Process.path, Process.requestSerialize, Process.responseDeserialize);
const kinds = [];
const action = { 1: { int64s: { array: [1] } } };
const requests = [
  () => ({ create_world: {} }),
  (last) => ({ join_world: { world_name: last.create_world.world_name } }),
  () => ({ step: { requested_observations: [1] } }),
  () => ({ step: { actions: action, requested_observations: [1] } }),
  () => ({ leave_world: {} }),
];

function next(last) {
  const request = requests.shift();
  if (request) call.write(request(last));
  else call.end();
}

call.on("data", (answer) => {
  kinds.push(answer.payload === "error" ? answer.error.message : answer.payload);
  next(answer);
});
call.on("error", () => {});
call.on("status", (status) => {
  kinds.push(`ended ${status.code}`);
  console.log(JSON.stringify(kinds));
  client.close();
});
next();
