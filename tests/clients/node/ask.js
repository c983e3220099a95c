// Usage: node ask.js PROTO_FOLDER ADDRESS CONTEXT [API_KEY]. Prints one JSON object of what it saw.
"use strict";
const grpc = require("@grpc/grpc-js");
const loader = require("@grpc/proto-loader");

const [protos, address, context, apiKey] = process.argv.slice(2);
const definition = loader.loadSync(["foveate/v1/answers.proto", "foveate/v1/contexts.proto"], {
  includeDirs: [protos], keepCase: true, longs: Number, enums: String, oneofs: true,
});
const { AnswerService, ContextService } = grpc.loadPackageDefinition(definition).foveate.v1;
const answers = new AnswerService(address, grpc.credentials.createInsecure());
const contexts = new ContextService(address, grpc.credentials.createInsecure());

function metadata() {
  const made = new grpc.Metadata();
  if (apiKey) made.set("authorization", `Bearer ${apiKey}`);
  return made;
}

function deadline(seconds) {
  return { deadline: Date.now() + seconds * 1000 };
}

function call(service, method, request) {
  return new Promise((resolve, reject) => {
    service[method](request, metadata(), deadline(60), (error, reply) => (error ? reject(error) : resolve(reply)));
  });
}

function ask(request, { cancelAfter = Infinity } = {}) {
  return new Promise((resolve) => {
    const seen = { kinds: [], text: "", num_tokens: 0 };
    const stream = answers.Ask(request, metadata(), deadline(60));
    stream.on("data", (event) => {
      seen.kinds.push(event.event);
      if (event.delta) {
        seen.text += event.delta.text;
        seen.num_tokens += event.delta.token_ids.length;
      }
      if (event.finished) seen.finished = event.finished;
      if (seen.kinds.length === cancelAfter) stream.cancel();
    });
    stream.on("error", (error) => {
      seen.code = error.code;
      // google.rpc.Status, as every language's rich-error library reads it.
      const [details] = error.metadata.get("grpc-status-details-bin");
      seen.has_details = Buffer.isBuffer(details) && details.includes("google.rpc.ErrorInfo");
      seen.violations = Buffer.isBuffer(details) && details.includes("sampling.temperature");
    });
    stream.on("status", (status) => resolve({ ...seen, code: seen.code ?? status.code }));
  });
}

async function main() {
  const question = { context, question: "Describe the video." };
  const told = {
    info: await call(answers, "GetServerInfo", {}),
    contexts: (await call(contexts, "ListContexts", {})).contexts.map((one) => one.name),
    whole: await ask(question),
    again: await ask(question),
    cancelled: await ask({ ...question, max_tokens: 1500, sampling: { temperature: 5, seed: 3 } }, { cancelAfter: 3 }),
    wrong: await ask({ ...question, sampling: { temperature: -1 } }),
    missing: await ask({ ...question, context: `contexts/${"0".repeat(64)}` }),
  };
  console.log(JSON.stringify(told));
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
