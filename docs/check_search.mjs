// `node docs/check_search.mjs SITE`: in the built site, a search for each of these names finds its entry in the reference first.
// The search itself is the script that a browser runs as a worker; the worker's scope is made of a few stand-ins here.

import {readFileSync, readdirSync} from "node:fs";
import {join} from "node:path";
import {createContext, runInContext} from "node:vm";

// The ten names that README and docs use most.
const ENTRIES = {
  make_vec_remote: "bridge.make_vec_remote",
  serve_gym: "bridge.serve_gym",
  make_remote: "bridge.make_remote",
  BlockingReset: "bridge.wrappers.BlockingReset",
  TLS: "bridge.TLS",
  serve_parallel: "bridge.serve_parallel",
  Limits: "bridge.Limits",
  SB3VecEnv: "bridge.wrappers.SB3VecEnv",
  RealTime: "bridge.RealTime",
  Throttle: "bridge.wrappers.Throttle",
};

// The kinds of messages between a page and the worker.
const SETUP = 0, QUERY = 2;

const site = process.argv[2];
const folder = join(site, "assets/javascripts/workers");
const program = readdirSync(folder).find(name => /^search\..*\.js$/.test(name));
const index = JSON.parse(readFileSync(join(site, "search/search_index.json"), "utf8"));

let answered;
const scope = {console, performance, URL, setTimeout, clearTimeout, importScripts() {}, postMessage: message => answered(message)};
scope.self = scope;
scope.addEventListener = (_, listener) => { scope.onmessage = listener; };
createContext(scope);
runInContext(readFileSync(join(folder, program), "utf8"), scope);

function ask(type, data) {
  return new Promise(resolve => {
    answered = resolve;
    scope.onmessage({data: {type, data}});
  });
}

await ask(SETUP, {...index, options: {suggest: false}});
const wrong = [];
for (const [name, entry] of Object.entries(ENTRIES)) {
  const {data} = await ask(QUERY, name);
  const first = data.items[0]?.[0].location;
  if (first !== `reference.html#${entry}`) wrong.push(`${name}: expected reference.html#${entry} first, got ${first}`);
}
if (wrong.length) console.error(wrong.join("\n"));
process.exitCode = wrong.length ? 1 : 0;
