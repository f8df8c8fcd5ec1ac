// Mansio over gRPC from Node.js: create a topic, publish, receive with credits, acknowledge.
//
// With a broker (`mansio serve --grpc 127.0.0.1:50051`):
//
//     npm ci && node main.js 127.0.0.1:50051

import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const TOPIC = "orders";
const GROUP = "billing";
const COUNT = 5;
const CREDITS = 2; // so many records are sent before the first acknowledgement
const PROTO = fileURLToPath(new URL("../../../src/mansio/api/grpc/mansio.proto", import.meta.url));

const { mansio } = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, { longs: String }));

async function main(address) {
  const client = new mansio.v1.Mansio(address, grpc.credentials.createInsecure());
  const call = (method, request) => promisify(client[method]).call(client, request);
  try {
    await call("CreateTopic", { name: TOPIC, partitions: 1 }).catch((error) => {
      if (error.code !== grpc.status.ALREADY_EXISTS) throw error;
    });
    await call("AlterGroup", { group: GROUP, set: { "share.auto.offset.reset": "earliest" } });

    const records = [];
    for (let number = 0; number < COUNT; number++) {
      records.push({ key: Buffer.from("ann"), value: Buffer.from(`${number} apples`) });
    }
    const { ranges } = await call("Publish", { topic: TOPIC, records });
    for (const { count, offset, error } of ranges) {
      if (error) throw new Error(`${error.name}: ${error.message}`);
      console.log(`published ${count} records at offset ${offset ?? 0}`);
    }
    await receive(client);
  } finally {
    client.close();
  }
}

// Print and acknowledge records until COUNT acknowledgements are stored.
async function receive(client) {
  const stream = client.Receive({ deadline: Date.now() + 60_000 });
  stream.write({ open: { group: GROUP, topics: [TOPIC] }, credits: CREDITS });
  let stored = 0;
  for await (const { records = [], failed = [], acknowledged = 0 } of stream) {
    for (const { error } of failed) throw new Error(`${error.name}: ${error.message}`);
    stored += acknowledged;
    for (const record of records) console.log(`received ${record.value}`);
    if (records.length > 0) {
      stream.write({ ack: records.map((record) => record.receipt), credits: records.length });
    }
    if (stored >= COUNT) stream.end(); // the broker ends its side, and the loop
  }
  if (stored < COUNT) throw new Error("the broker ended the stream");
  console.log(`acknowledged ${stored} records`);
}

if (process.argv.length !== 3) {
  console.error("usage: node main.js HOST:PORT");
  process.exit(2);
}
await main(process.argv[2]);
