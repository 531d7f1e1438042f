// An OpenAI-compatible client in another language: fetch, a stream of server-sent events, an abort.
// node client.mjs URL: prints one JSON object with what it got.
const url = process.argv[2];
const post = (body, signal) =>
  fetch(`${url}/v1/chat/completions`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
const messages = [{ role: "user", content: "Hello" }];

async function* events(response) {
  let held = "";
  for await (const part of response.body.pipeThrough(new TextDecoderStream())) {
    held += part;
    const frames = held.split("\n\n");
    held = frames.pop();
    for (const frame of frames) if (frame.startsWith("data: ")) yield frame.slice(6);
  }
}

const whole = await (await post({ messages })).json();
let streamed = "";
let last = "";
for await (const data of events(await post({ messages, stream: true }))) {
  last = data;
  if (data !== "[DONE]") streamed += JSON.parse(data).choices[0]?.delta.content ?? "";
}
const refused = await post({ messages, temperature: 9 });
const controller = new AbortController();
const response = await post({ messages, stream: true }, controller.signal);
await response.body.getReader().read();
controller.abort();
const models = await (await fetch(`${url}/v1/models`)).json();
console.log(
  JSON.stringify({
    whole: whole.choices[0].message.content,
    streamed,
    last,
    status: refused.status,
    param: (await refused.json()).error.param,
    models: models.data.map((each) => each.id),
  }),
);
