// The page's behaviour: takes pictures, sends them to the service, keeps what came back. draw.js puts it on the screen.

import * as draw from "./draw.js";
import { PASSING, ServiceError, call, tooSlow, upload } from "./send.js";
import { shorterSide, shrink } from "./shrink.js";
import { offerCorrection, offerTeaching } from "./teach.js";

const RETRY_MS = 2000;
const TOP_K = 5;
const IDLE = ["idle", "Nothing yet", "The answer appears here."];
const NOT_A_FILE = "That was not a file. Save the picture first, or copy the picture itself and paste it here.";

const AT_ONCE = 2; // pictures on their way at a time, on a slow line one: more would share it
/** Drawn for this project; each is offered where the served set knows its class. */
const EXAMPLES = { "golf ball": "golf-ball.jpg", parachute: "parachute.jpg" };

const $ = draw.byId;

/**
 * The key is kept for this tab alone, and only until it is closed.
 * @typedef {{file: File, url: string, sent?: object, result?: object, roundTripMs?: number}} Item  a picture, what shrink() made of it, and an answer or {error}
 * @type {{models: ?object, modelSet: string, items: Item[], sending: AbortController, key: string, isSlow: boolean}}
 */
const state = { models: null, modelSet: "", items: [], sending: new AbortController(), key: sessionStorage.getItem("key") ?? "", isSlow: false };

/** What an address says of the set that was chosen; nothing for the service's first. */
const ofSet = (before) => (state.modelSet ? `${before}model_set=${encodeURIComponent(state.modelSet)}` : "");

/** What the page can do about photographs that are taught, as teach.js asks for it. */
const teacher = {
  keep: async (label, file) => {
    const sent = await shrink(file, shorterSide(state.models));
    return upload(`/v1/teach?label=${encodeURIComponent(label)}${ofSet("&")}`, sent, state.key, new AbortController().signal, () => {});
  },
  erase: (id) => call(`/v1/samples/${id}`, state.key, undefined, "DELETE"),
  figures: () => call("/v1/teach", state.key),
  showsCommands: () => Boolean(state.models?.operator_hints),
};

let scaling = Promise.resolve(); // one picture at a time: each takes much memory while it is read

/** Makes what is sent of a picture; for a slow line it is smaller. */
async function prepare(item) {
  scaling = scaling.then(() => shrink(item.file, shorterSide(state.models), state.isSlow));
  item.sent = await scaling;
}

/** Sends one picture; one that does not arrive in time is sent once more, smaller if that is possible. */
async function send(item, signal) {
  await prepare(item);
  signal.throwIfAborted();
  const path = `/v1/classify?top_k=${Math.min(TOP_K, state.models?.labels.length ?? TOP_K)}${ofSet("&")}`;
  const index = state.items.indexOf(item);
  const report = (share) => signal.aborted || draw.progress(state.items.length, index, share, state.isSlow);
  const wasSlow = state.isSlow;
  const once = () => upload(path, item.sent, state.key, signal, report, !state.isSlow);
  try {
    return await once();
  } catch (error) {
    if (signal.aborted || error.status !== 408 || wasSlow) throw error;
    state.isSlow = true; // further pictures are sent smaller at once
    await prepare(item);
    if (item.sent.body === item.file) throw tooSlow();
    return await once();
  }
}

/** Asks about one picture; its answer, or its error, becomes the item's result. */
async function ask(item, signal) {
  const started = performance.now();
  try {
    item.result = await send(item, signal);
    item.roundTripMs = performance.now() - started;
  } catch (error) {
    if (signal.aborted) return;
    const isLost = error.status === 0 && !(await isReadable(item.file));
    item.result = { error: isLost ? new ServiceError(`${item.file.name} cannot be read. Choose it again.`) : error };
  }
  if (!signal.aborted) draw.cards(state.items, state.items.indexOf(item), openAnswer);
}

/** Polls /readyz until the service is ready, and says so meanwhile. False when something else took over. */
async function untilReady(signal) {
  while (!signal.aborted) {
    try {
      await call("/readyz", state.key, signal);
      return true;
    } catch (error) {
      if (signal.aborted) break;
      draw.phase("waiting", error.status ? "Starting up" : PASSING[0], `${error.message} This page keeps trying.`);
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
  return false;
}

async function loadModels() {
  if (state.models) return;
  try {
    const asked = state.modelSet;
    const models = await call(`/v1/models${ofSet("?")}`, state.key);
    if (asked !== state.modelSet) return; // another set was chosen meanwhile
    state.models = models;
    draw.classes(models);
    draw.sets(models);
    offerTeaching(models, teacher);
    draw.examples(Object.entries(EXAMPLES).filter(([label]) => models.labels.includes(label)), takeExample);
  } catch (error) {
    draw.noClasses(`Which classes are served could not be read. ${error.message}`);
    if (error.status === 401) draw.askForKey(error.message);
  }
}

/** Classifies the pictures without an answer; a service that is not ready is waited for once. */
async function classify(mayWait = true) {
  state.sending.abort();
  const { signal } = (state.sending = new AbortController());
  draw.phase("busy", "Looking…", "");
  const waiting = state.items.filter(({ result }) => !result || result.error);
  for (const item of waiting) delete item.result;
  draw.cards(state.items, 0, openAnswer);
  await loadModels();
  const queue = [...waiting];
  const work = async (_, place) => {
    while (queue.length && !signal.aborted && !(place && state.isSlow)) await ask(queue.shift(), signal);
  };
  await Promise.all(Array.from({ length: AT_ONCE }, work));
  if (signal.aborted) return;
  if (mayWait && waiting.some(({ result }) => result.error?.status === 503)) {
    if (await untilReady(signal)) await classify(false);
  } else {
    finish();
  }
}

/** Whether the browser can still read a file, which may have been changed, removed, or be a folder. */
const isReadable = async (file) => {
  try {
    await file.slice(0, 1).arrayBuffer();
    return true;
  } catch {
    return false;
  }
};

function finish() {
  const { items } = state;
  const failed = items.filter(({ result }) => result.error);
  select(Math.max(items.findIndex(({ result }) => !result.error), 0));
  const keyless = failed.find(({ result }) => result.error.status === 401);
  if (keyless) draw.askForKey(keyless.result.error.message);
  if (items.length > 1) draw.announce(`${items.length - failed.length} of ${items.length} files classified.`);
  else if (!failed.length) draw.roundTrip(items[0].roundTripMs);
  draw.retry(failed.filter(({ result }) => result.error.status in PASSING).length, items.length);
}

/** Opens one of the classified files in full; on a phone its answer may be out of sight. */
function openAnswer(chosen) {
  select(chosen);
  $("answer").scrollIntoView({ block: "nearest" });
}

function select(chosen) {
  const item = state.items[chosen];
  draw.preview(item);
  draw.cards(state.items, chosen, openAnswer);
  const { error } = item.result;
  if (error) draw.failure(PASSING[error.status] ?? "No answer for this", error.message);
  else draw.answer(item.result, state.models, askSet);
  offerCorrection(item, state.models, teacher);
  draw.sent(item);
}

/** Takes over new files in place of the ones before. */
function take(files) {
  if (!files.length) return;
  for (const { url } of state.items) URL.revokeObjectURL(url);
  state.items = files.map((file) => ({ file, url: URL.createObjectURL(file) }));
  draw.preview(state.items[0]);
  classify();
}

/** Takes one of the page's own pictures. */
async function takeExample(name) {
  const response = await fetch(new URL(name, import.meta.url));
  take([new File([await response.blob()], name, { type: "image/jpeg" })]);
}

/** Files may be dropped anywhere: next to the drop area the browser would leave the page and open them. */
function listenToDrops() {
  const mark = (isOver) => $("drop").classList.toggle("over", isOver);
  addEventListener("dragover", (event) => {
    event.preventDefault();
    mark(true);
  });
  addEventListener("dragleave", (event) => event.relatedTarget || mark(false));
  addEventListener("drop", (event) => {
    event.preventDefault();
    mark(false);
    const files = [...event.dataTransfer.files];
    if (files.length) take(files);
    else if (event.dataTransfer.types.includes("text/uri-list")) draw.failure("No answer for this", NOT_A_FILE);
  });
}

/** Takes the key that was typed, and goes on with what wanted one. */
async function useKey(event) {
  event.preventDefault();
  state.key = $("key").value;
  sessionStorage.setItem("key", state.key);
  $("key").value = "";
  draw.phase(...IDLE);
  if (state.items.length) await classify();
  else await begin();
}

/** Takes another set of the service, and shows what it says of the pictures that are there. */
async function useSet() {
  state.modelSet = $("model-set").value;
  state.models = null;
  for (const item of state.items) delete item.result; // of the set before
  if (state.items.length) await classify();
  else await loadModels();
}

/** Asks another set about the pictures, as if it had been chosen from the list. */
function askSet(name) {
  $("model-set").value = name;
  return useSet();
}

async function begin() {
  await loadModels();
  if (!state.items.length && $("key-form").hidden) draw.phase(...IDLE);
}

function listen() {
  listenToDrops();
  addEventListener("paste", (event) => take([...event.clipboardData.files]));
  $("file").addEventListener("change", () => {
    take([...$("file").files]);
    $("file").value = ""; // so that the same file can be chosen again
  });
  $("retry").addEventListener("click", () => classify());
  $("model-set").addEventListener("change", useSet);
  $("key-form").addEventListener("submit", useKey);
  $("preview").addEventListener("error", () => ($("preview").hidden = true));
}

draw.phase(...IDLE);
listen();
if (await untilReady(state.sending.signal)) await begin();
