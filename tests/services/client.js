// A client in another language: @grpc/grpc-js, with the .proto that `quire proto --service` wrote, and nothing else.
// node client.js <file.proto> <address>

const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [file, address] = process.argv.slice(2);
const definition = loader.loadSync(file, { keepCase: true, longs: Number });
const { art } = grpc.loadPackageDefinition(definition);
const client = new art.Gallery(address, grpc.credentials.createInsecure());

const picture = (label, ...pixels) => ({
  label,
  pixels: { dtype: 'float32', shape: [4], data: Buffer.from(new Float32Array(pixels).buffer) },
});
const floats = (tensor) => Array.from(new Float32Array(new Uint8Array(tensor.data).buffer));

const unary = (method, message) => new Promise((resolve) => {
  client[method](message, (error, answer) => resolve(error ? { code: error.code, details: error.details } : answer));
});
const stream = (method, messages) => new Promise((resolve, reject) => {
  const call = client[method]();
  const answers = [];
  call.on('data', (answer) => answers.push(answer)).on('end', () => resolve(answers)).on('error', reject);
  messages.forEach((message) => call.write(message));
  call.end();
});

(async () => {
  const one = picture('one', 1, 2, 3, 4);
  const two = picture('two', 5, 6, 7, 8);
  const embedded = await unary('Embed', { documents: [one, two] });
  const scores = await stream('Running', [one, two]);
  const streamed = await stream('EmbedStream', [{ documents: [one] }, { documents: [two, one] }]);
  const wrong = await unary('Rate', { pixels: { dtype: 'float32', shape: [2], data: Buffer.alloc(8) } });
  console.log(JSON.stringify({
    embeddings: embedded.documents.map((doc) => floats(doc.embedding)),
    labels: embedded.documents.map((doc) => doc.label),
    scores: scores.map((score) => score.value),
    streamed: streamed.map((answer) => answer.documents.map((doc) => doc.label)),
    wrong,
  }));
})();
