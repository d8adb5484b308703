// A client in another language: generates, streams, cancels, and reads an error's details.
//
//     npm install @grpc/grpc-js @grpc/proto-loader
//     node docs/examples/generate.js 127.0.0.1:50051 "Once upon a time"

const grpc = require('@grpc/grpc-js');
const path = require('path');
const protoLoader = require('@grpc/proto-loader');

const protos = path.join(__dirname, '..', '..', 'protos');
const definition = protoLoader.loadSync('ppserve/v1/generation.proto', {
  includeDirs: [protos], keepCase: true, enums: String, longs: String, oneofs: true,
});
const { GenerationService } = grpc.loadPackageDefinition(definition).ppserve.v1;

const [target = '127.0.0.1:50051', text = 'Once upon a time'] = process.argv.slice(2);
const client = new GenerationService(target, grpc.credentials.createInsecure());

// Resolves with how the stream ended: { finish }, or { error } with the gRPC status.
function generate(request, onText, cancelAfter = Infinity) {
  return new Promise((resolve) => {
    let finish;
    let messages = 0;
    const call = client.Generate(request, { deadline: Date.now() + 60_000 });
    call.on('data', (message) => {
      onText(message.text);
      finish = message.finish ?? finish;
      messages += 1;
      if (messages === cancelAfter) call.cancel();
    });
    call.on('error', (error) => resolve({ error }));
    call.on('end', () => resolve({ finish }));
  });
}

async function main() {
  const answered = await generate({ text, stop: { max_tokens: 24 }, sampling: { seed: 7 } },
    (piece) => process.stdout.write(piece));
  console.log(`\n-- ${answered.finish.reason}`);

  const cancelled = await generate({ text, stop: { max_tokens: 200, ignore_eos: true } }, () => {}, 3);
  console.log(`-- cancelled after 3 messages: ${grpc.status[cancelled.error.code]}`);

  const refused = await generate({ text, sampling: { top_p: 3, n: 99 } }, () => {});
  console.log(`-- refused: ${grpc.status[refused.error.code]}: ${refused.error.details}`);
  client.close();
}

main();
