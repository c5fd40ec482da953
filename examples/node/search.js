// The Node service of ../two_services.py: stores photos, and finds the nearest one by embeddings from the Python service.
// node search.js <folder with search.proto and embedder.proto> <address of the embedder>

const path = require('path');
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [folder, embedder] = process.argv.slice(2);
const load = (file) => grpc.loadPackageDefinition(
  loader.loadSync(path.join(folder, file), { keepCase: true, longs: Number, defaults: true }),
).art;

// --- client of the Python service: returns photos with their embeddings

const python = new (load('embedder.proto').Embedder)(embedder, grpc.credentials.createInsecure());
const embed = (photos) => new Promise((resolve, reject) => {
  python.Embed({ documents: photos }, (error, answer) => (error ? reject(error) : resolve(answer.documents)));
});
const floats = ({ data }) => new Float32Array(new Uint8Array(data).buffer); // little endian, row by row
const distance = (a, b) => Math.hypot(...a.map((value, i) => value - b[i]));

// --- this service

const known = [];

async function remember({ photos }) {
  known.push(...(await embed(photos)).map(({ label, embedding }) => ({ label, vector: floats(embedding) })));
  return { photos: [], known: known.length };
}

async function nearest(photo) {
  const [{ embedding }] = await embed([photo]);
  const matches = known.map(({ label, vector }) => ({ label, distance: distance(vector, floats(embedding)) }));
  return matches.reduce((best, match) => (match.distance < best.distance ? match : best));
}

const method = (answer) => (call, done) => answer(call.request).then((message) => done(null, message), done);
const server = new grpc.Server();
server.addService(load('search.proto').Search.service, { Remember: method(remember), Nearest: method(nearest) });
server.bindAsync('127.0.0.1:0', grpc.ServerCredentials.createInsecure(), (error, port) => {
  if (error) throw error;
  console.log(port);
});
process.stdin.resume().on('end', () => server.tryShutdown(() => process.exit()));
