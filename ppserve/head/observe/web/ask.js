// Prompts and chats: a request, its answer as it comes, and what both were.

let turns = [];           // of the chat: {role, content}, and what the model thought and called
let latest = null;        // {path, body, seed, text, thought, calls, shown}: the latest request and its answer
let stopper = null;       // an AbortController while an answer comes
let requests = 0;

const kindOf = () => ASKS === "chat" && document.querySelector("input[name=kind]:checked").value === "chat" ? "chat" : "text";
const numberOf = (name) => byId(name).value === "" ? undefined : Number(byId(name).value);

/** The calls of the last answer whose results were not given yet, in their order. */
function callsThatWait() {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  return (turns[last]?.tool_calls ?? []).slice(turns.length - 1 - last);
}

/** What was typed, as a message: the result of the call that waits, or the user's. */
function messageOf(prompt) {
  const [call] = callsThatWait();
  return call ? {role: "tool", tool_call_id: call.id, content: prompt} : {role: "user", content: prompt};
}

/** Fields of a chat that say whether the model thinks first, and what it may call. Throws for tools that are no JSON. */
function chatOptions() {
  const thinking = byId("thinking").value, tools = byId("tools").value.trim(), options = {};
  if (thinking) options.chat_template_kwargs = {enable_thinking: thinking === "on"};
  if (tools) {
    try {
      options.tools = JSON.parse(tools);
    } catch (error) {
      throw new Error(`The tools are not JSON: ${error.message}`);
    }
  }
  return options;
}

/** What is asked for now, as JSON: fields that are not given are absent. */
function bodyOf(prompt) {
  const chats = kindOf() === "chat", system = byId("system").value.trim();
  const said = chats
    ? {messages: [...(system ? [{role: "system", content: system}] : []), ...turns, messageOf(prompt)], ...chatOptions()}
    : {prompt};
  const options = Object.fromEntries(["temperature", "top_p", "max_tokens", "seed"].map((name) => [name, numberOf(name)]));
  if (options.max_tokens === undefined) options.max_tokens = chats ? 512 : 200;
  return {path: chats ? "/v1/chat/completions" : "/v1/completions", body: {...said, ...options}};
}

const streamed = (body) => ({...body, stream: true, stream_options: {include_usage: true, continuous_usage_stats: true}});
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

function showCurl({path, body}) {
  const key = WANTS_KEY ? ` -H "authorization: Bearer $PPSERVE_API_KEY"` : "";
  const line = `curl -sN ${location.origin}${path} -H 'content-type: application/json'${key} -d ${quoted(JSON.stringify({...body, stream: true}))}`;
  byId("curl").replaceChildren(codeBlock(line, "shell"));
}

/** The events of an answer, parsed, up to [DONE]. */
async function* eventsOf(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const {value, done} = await reader.read();
    if (done) throw new Error("the connection broke before the answer's end");
    const events = (held + value).split("\n\n");
    held = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

function newTurn(who, kind) {
  const turn = element("article", "", {class: `turn ${kind}`}), content = element("div");
  turn.append(element("span", who, {class: "who"}), content);
  byId("log").append(turn);
  return content;
}

function showAnswer(into, {path, body}, {text, thought, calls}) {
  if (path.includes("chat")) {
    showThought(into, thought, Boolean(text || calls.length));
    showMarkdown(into, text);
    showCalls(into, calls);
    return;
  }
  into.className = "plain";
  into.replaceChildren(element("span", body.prompt, {class: "given"}), text);
}

/** What the model thinks stands above its answer. It is open until the answer begins. */
function showThought(into, thought, hasAnswer) {
  let box = into.parentElement.querySelector(".thought");
  if (!thought) return box?.remove();
  if (!box) {
    box = element("details", "", {class: "thought", open: ""});
    box.append(element("summary"), element("div", "", {class: "plain"}));
    into.before(box);
  }
  const [summary, words] = box.children, isOver = hasAnswer && !box.classList.contains("over");
  words.textContent = thought.trim();
  summary.textContent = hasAnswer ? "What the model thought" : "The model thinks";
  box.classList.toggle("over", hasAnswer);
  if (isOver) box.open = false;
}

function showCalls(into, calls) {
  for (const shown of into.parentElement.querySelectorAll(".call")) shown.remove();
  into.after(...calls.map(({function: {name, arguments: given}}) => {
    const line = element("p", "calls ", {class: "call"});
    line.append(element("code", `${name}(${given})`));
    return line;
  }));
}

function endWith(into, text, isBad) {
  into.parentElement.querySelector(".end")?.remove();
  into.parentElement.append(element("p", text, {class: `end ${isBad ? "bad" : "soft"}`, ...(isBad ? {role: "alert"} : {})}));
}

/** Ask, and show what comes. The text that came is kept, whatever ends the answer. */
async function answer(request, into) {
  stopper = new AbortController();
  requests += 1;
  ownRequest = `page-${crypto.getRandomValues(new Uint32Array(2)).join("")}-${requests}`;
  const progress = {text: "", thought: "", calls: [], seed: request.body.seed, tokens: 0, beganMs: performance.now(), firstMs: null, lastMs: null, reason: null};
  setAsking(true);
  let frame = 0;
  const show = () => {
    frame = 0;
    const isAtEnd = byId("log").scrollHeight - byId("log").scrollTop - byId("log").clientHeight < 40;
    showAnswer(into, request, progress);
    if (isAtEnd) byId("log").scrollTop = byId("log").scrollHeight;
    showFigures(progress, true);
  };
  const ticking = setInterval(() => showFigures(progress, true), 250);
  try {
    const response = await fetch(request.path, {
      method: "POST", signal: stopper.signal, body: JSON.stringify(streamed(request.body)),
      headers: headersOf({"content-type": "application/json", "x-request-id": ownRequest}),
    });
    if (response.status === 401) wantKey("The server does not know this key.");
    if (!response.ok) throw new Error(await problemOf(response));
    for await (const event of eventsOf(response.body)) {
      if (event.error) throw new Error(event.error.message);
      note(progress, event);
      if (!frame) frame = requestAnimationFrame(show);
    }
    const ends = {length: "ended with max tokens or the context", abort: "ended before its time"};
    if (ends[progress.reason]) endWith(into, ends[progress.reason], false);
  } catch (error) {
    const stopped = error.name === "AbortError";
    const text = error instanceof TypeError ? "the server cannot be reached" : error.message;
    endWith(into, stopped ? "stopped" : text, !stopped);
  }
  clearInterval(ticking);
  cancelAnimationFrame(frame);
  show();
  showFigures(progress, false);
  stopper = null;
  setAsking(false);
  return progress;
}

async function problemOf(response) {
  const wait = response.headers.get("retry-after"), later = wait ? ` Ask again in ${wait} s.` : "";
  try {
    return `${(await response.json()).error.message}.${later}`;
  } catch {
    return `the server answered with status ${response.status}.${later}`;
  }
}

function note(progress, event) {
  const [choice] = event.choices ?? [];
  progress.seed = event.seed ?? progress.seed;
  progress.reason = choice?.finish_reason ?? progress.reason;
  const tokens = event.usage?.completion_tokens ?? progress.tokens;
  if (tokens > progress.tokens) {
    progress.tokens = tokens;
    progress.lastMs = performance.now();
    progress.firstMs ??= progress.lastMs;
    progress.firstTokens ??= tokens;
  }
  progress.text += choice?.delta?.content ?? choice?.text ?? "";
  progress.thought += choice?.delta?.reasoning_content ?? "";
  for (const {index, id, type, function: {name, arguments: given}} of choice?.delta?.tool_calls ?? []) {
    progress.calls[index] ??= {id, type, function: {name, arguments: ""}};
    progress.calls[index].function.arguments += given;
  }
}

/** An answer as a message of the chat: templates may show what the model thought and called. */
const answerMessage = ({text, thought, calls}) => ({
  role: "assistant", content: text,
  ...(thought ? {reasoning_content: thought} : {}),
  ...(calls.length ? {tool_calls: calls} : {}),
});
const isSame = (one, other) => JSON.stringify(answerMessage(one)) === JSON.stringify(answerMessage(other));
const hasCome = ({text, thought, calls, reason}) => Boolean(text || thought || calls.length || reason);

function showFigures({tokens, beganMs, firstMs, lastMs, seed, firstTokens}, isRunning) {
  const parts = [];
  if (firstMs !== null) {
    const more = tokens - firstTokens, perSecond = more > 0 ? 1e3 * more / (lastMs - firstMs) : null;
    parts.push(counted(tokens, "token"), `first token after ${milliseconds((firstMs - beganMs) / 1e3)} ms`);
    if (perSecond !== null) parts.push(`${perSecond.toFixed(perSecond < 10 ? 1 : 0)} tokens/s`);
  } else if (isRunning) {
    parts.push(`waiting for the first token, ${((performance.now() - beganMs) / 1e3).toFixed(1)} s`);
  }
  if (seed !== undefined && seed !== null && !isRunning) parts.push(`seed ${seed}`);
  const quietS = isRunning && lastMs !== null ? (performance.now() - lastMs) / 1e3 : 0;
  if (quietS > 0.5) parts.push(`nothing new for ${quietS.toFixed(1)} s${byId("away").textContent ? ": a stage is away, the text goes on when it is back" : ""}`);
  byId("figures").textContent = parts.join(", ");
}

function setAsking(now) {
  isAsking = now;
  byId("log").setAttribute("aria-busy", String(now));
  byId("send").disabled = now;
  byId("stop").disabled = !now;
  byId("again").disabled = now || !latest || latest.seed === undefined;
  byId("again").title = latest?.seed === undefined ? "" : `seed ${latest.seed}`;
}

async function send() {
  const prompt = byId("prompt").value;
  const question = messageOf(prompt), calls = callsThatWait();
  if (stopper || (kindOf() === "chat" && !prompt.trim() && !calls.length)) return;
  if (!previewCurl()) {
    byId("tools").closest("details").open = true;
    return byId("tools").focus();
  }
  const request = bodyOf(prompt);
  if (request.body.messages) {
    newTurn(calls.length ? `result of ${calls[0].function.name}` : "you", "user").append(element("div", prompt, {class: "plain"}));
    byId("prompt").value = "";
    if (calls.length > 1) {  // the model goes on when it has all results
      turns.push(question);
      return showLabel();
    }
  } else {
    byId("log").replaceChildren();
  }
  const into = newTurn("model", "assistant");
  byId("log").scrollTop = byId("log").scrollHeight;
  const mine = turns, came = await answer(request, into);
  if (turns !== mine) return;  // a new chat has begun meanwhile
  if (hasCome(came)) {
    const {seed, text, thought, calls} = came;
    latest = {...request, seed, text, thought, calls, shown: into, isWhole: came.reason !== null};
    if (request.body.messages) turns.push(question, answerMessage(came));
  } else {
    latest = null;
    byId("prompt").value ||= prompt;  // nothing came: it may be asked once more
  }
  showLabel();
  setAsking(false);
}

/** The same request with the seed that the answer had: the answer is the same, bit for bit. */
async function again() {
  if (stopper || !latest) return;
  const request = {path: latest.path, body: {...latest.body, seed: latest.seed}};
  showCurl(request);
  latest.shown.parentElement.querySelector(".end")?.remove();
  latest.shown.parentElement.querySelector(".thought")?.remove();
  const before = latest, mine = turns, came = await answer(request, latest.shown);
  if (turns !== mine) return;  // a new chat has begun meanwhile
  const isWhole = came.reason !== null;
  if (isWhole && before.isWhole) endWith(latest.shown, isSame(came, before) ? "the same answer, character for character" : "another answer: see what the server says of determinism", false);
  latest = {...latest, text: came.text, thought: came.thought, calls: came.calls, isWhole};
  if (turns.length && hasCome(came)) turns[turns.length - 1] = answerMessage(came);
  showLabel();
  setAsking(false);
}

function startAnew() {
  stopper?.abort();
  turns = [];
  latest = null;
  ownRequest = "";
  byId("log").replaceChildren();
  byId("figures").textContent = "";
  byId("prompt").focus();
  showLabel();
  setAsking(false);
}

/** Show the line for curl. Returns whether what was typed can be asked. */
function previewCurl() {
  byId("tools-problem").textContent = "";
  try {
    showCurl(bodyOf(byId("prompt").value));
  } catch (error) {
    byId("tools-problem").textContent = error.message;
    return false;
  }
  return true;
}

function showLabel() {
  const [call] = callsThatWait();
  byId("prompt-label").textContent = call ? `Result of ${call.function.name}` : kindOf() === "chat" ? "Your message" : "Prompt";
}

function showKind() {
  const chats = kindOf() === "chat";
  showLabel();
  byId("system-field").hidden = !chats;
  byId("thinking-field").hidden = !chats || !KNOWS.includes("thinking");
  byId("tools-field").hidden = !chats || !KNOWS.includes("tools");
  byId("max_tokens").placeholder = chats ? "512" : "200";
  byId("temperature").placeholder = "1";
  byId("top_p").placeholder = "1";
  byId("fresh").textContent = chats ? "New chat" : "Clear";
  if (!chats && !byId("prompt").value) byId("prompt").value = "Once upon a time";
  previewCurl();
}

function setUpAsking() {
  document.body.classList.add("asks");
  byId("ask").hidden = false;
  byId("kinds").hidden = ASKS !== "chat";
  byId("key-form").hidden = !WANTS_KEY || Boolean(sessionStorage.getItem(KEY_NAME));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    const key = byId("key").value.trim();
    if (!/^[\x20-\x7e]+$/.test(key)) {  // no header could carry it
      byId("key-problem").textContent = "A key has printable ASCII characters alone.";
      return;
    }
    sessionStorage.setItem(KEY_NAME, key);
    byId("key").value = "";
    byId("key-form").hidden = true;
    byId("prompt").focus();
    look();
  });
  byId("ask-form").addEventListener("submit", (event) => { event.preventDefault(); send(); });
  byId("ask-form").addEventListener("input", previewCurl);
  byId("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  addEventListener("keydown", (event) => { if (event.key === "Escape") stopper?.abort(); });
  byId("stop").addEventListener("click", () => stopper?.abort());
  byId("again").addEventListener("click", again);
  byId("fresh").addEventListener("click", startAnew);
  for (const choice of document.querySelectorAll("input[name=kind]")) choice.addEventListener("change", () => { startAnew(); showKind(); });
  showKind();
}

if (ASKS) setUpAsking();
