// Requests to the server's API. Addresses are relative, so the page also works below a path of a
// reverse proxy.

const KEY = "dlm-export.key";

/** An error of the API, or of the connection. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

export function storedKey() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function storeKey(key) {
  sessionStorage.setItem(KEY, key);
}

/** The models of the server, as `/v1/models` lists them. */
export async function listModels() {
  return (await (await send("v1/models")).json()).data;
}

/** The number of tokens of a text, without the tokens that the tokenizer adds before every text. */
export async function countTokens(model, text, specialTokens, signal) {
  const count = async (prompt) => {
    const body = { model, prompt, special_tokens: specialTokens };
    return (await (await send("tokenize", body, signal)).json()).count;
  };
  const [whole, added] = await Promise.all([count(text), count("")]);
  return whole - added;
}

/**
 * The chunks of a stream, as objects. Throws ApiError if the server reports an error, or if the
 * connection ends before the stream does.
 */
export async function* stream(path, body, signal) {
  const options = { stream: true, diffusing: true, stream_options: { include_usage: true } };
  const response = await send(path, { ...body, ...options }, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error) => { throw lost(error); });
      if (done) throw new ApiError("The connection ended before the answer was complete.");
      const events = (waiting + value).split("\n\n");
      waiting = events.pop();
      for (const event of events) {
        const content = event.replace(/^data: /, "");
        if (content === "[DONE]") return;
        const chunk = JSON.parse(content);
        if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function send(path, body, signal) {
  const headers = {};
  if (storedKey()) headers.authorization = `Bearer ${storedKey()}`;
  const options = { headers, signal };
  if (body) {
    headers["content-type"] = "application/json";
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
  }
  const response = await fetch(path, options).catch((error) => { throw lost(error); });
  if (!response.ok) throw await errorOf(response);
  return response;
}

async function errorOf(response) {
  const { error } = await response.json().catch(() => ({}));
  let message = error?.message ?? `The server answered with status ${response.status}.`;
  const wait = response.headers.get("retry-after");
  if (wait) message += ` Try again in ${wait} s.`;
  return new ApiError(message, { status: response.status, param: error?.param ?? null });
}

/** The error to report for a failed connection. A request that the reader stopped is no failure. */
function lost(error) {
  return error.name === "AbortError" ? error : new ApiError("The server cannot be reached.");
}
