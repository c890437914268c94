// The page's behaviour: takes pictures, sends them to the service, keeps what came back. draw.js puts it on the screen.

import * as draw from "./draw.js";
import { shorterSide, shrink } from "./shrink.js";

const RETRY_MS = 2000;
const TOP_K = 5;
const IDLE = ["idle", "Nothing yet", "The answer appears here."];
const NOT_A_FILE = "That was not a file. Save the picture first, or copy the picture itself and paste it here.";

/** Errors that may pass by themselves, by status (0: no answer at all); only these offer another try. */
const PASSING = {
  0: "No connection", 408: "Too slow", 429: "Busy right now", 500: "Something broke", 502: "Broken off", 503: "Not available", 504: "Too slow",
};

const $ = draw.byId;

/**
 * The key is kept for this tab alone, and only until it is closed.
 * @typedef {{file: File, url: string, sent?: object, result?: object}} Item  a picture, what shrink() made of it, and an answer or {error}
 * @type {{models: ?object, modelSet: string, items: Item[], sending: AbortController, key: string}}
 */
const state = { models: null, modelSet: "", items: [], sending: new AbortController(), key: sessionStorage.getItem("key") ?? "" };

/** An error of the service, or of the way to it (status 0). */
class ServiceError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/**
 * Fetches JSON; anything but a good answer becomes a ServiceError in the server's own words.
 * The service's routes begin where this file's folder lies: a route_prefix comes before them.
 */
async function call(path, options = {}) {
  const headers = { ...options.headers, ...(state.key && { authorization: `Bearer ${state.key}` }) };
  const response = await fetch(new URL(`..${path}`, import.meta.url), { ...options, headers }).catch(() => {
    throw new ServiceError("The service cannot be reached. Is it still running?", 0);
  });
  const body = await response.json().catch(() => null);
  if (response.ok && body) return body;
  throw new ServiceError(body?.error?.message ?? `The service answered ${response.status} and did not say why.`, response.status);
}

/** What an address says of the set that was chosen; nothing for the service's first. */
const ofSet = (before) => (state.modelSet ? `${before}model_set=${encodeURIComponent(state.modelSet)}` : "");

/** Makes the smaller pictures to send, one after another: a large one takes much memory while it is read. */
async function shrinkAll(items, signal) {
  for (const item of items) if (!signal.aborted) item.sent = await shrink(item.file, shorterSide(state.models));
}

/** One answer per picture, in order. A single picture travels as the body itself, several as multipart. */
async function send(items, signal) {
  const wasShrunk = items.some(({ sent }) => sent.before);
  const headers = wasShrunk ? { "x-tandem-shrunk": items.map(({ sent }) => sent.before ?? "-").join(", ") } : {};
  const path = `/v1/classify?top_k=${Math.min(TOP_K, state.models?.labels.length ?? TOP_K)}${ofSet("&")}`;
  if (items.length === 1) return [await call(path, { method: "POST", body: items[0].sent.body, headers, signal })];
  const form = new FormData();
  for (const { file, sent } of items) form.append("files", sent.body, file.name);
  return (await call(path, { method: "POST", body: form, headers, signal })).results;
}

/** Polls /readyz until the service is ready, and says so meanwhile. False when something else took over. */
async function untilReady(signal) {
  while (!signal.aborted) {
    try {
      await call("/readyz", { signal });
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
    const models = await call(`/v1/models${ofSet("?")}`);
    if (asked !== state.modelSet) return; // another set was chosen meanwhile
    state.models = models;
    draw.classes(models);
    draw.sets(models);
  } catch (error) {
    draw.noClasses(`Which classes are served could not be read. ${error.message}`);
    if (error.status === 401) draw.askForKey(error.message);
  }
}

/** Classifies the files held; a service that is not ready is waited for once, any other error is shown. */
async function classify(mayWait = true) {
  state.sending.abort();
  const { signal } = (state.sending = new AbortController());
  draw.phase("busy", "Looking…", "");
  for (const item of state.items) delete item.result; // of another set, perhaps
  draw.cards(state.items, 0, openAnswer);
  await loadModels();
  const { items } = state;
  await shrinkAll(items, signal);
  if (signal.aborted) return;
  const started = performance.now();
  try {
    const results = await send(items, signal);
    const roundTripMs = performance.now() - started;
    if (!signal.aborted) finish(results, roundTripMs);
  } catch (error) {
    if (signal.aborted) return;
    if (error.status === 503 && mayWait) {
      if (await untilReady(signal)) await classify(false);
      return;
    }
    const lost = error.status === 0 ? await unreadable() : null;
    if (!signal.aborted) fail(lost ? new ServiceError(`${lost} cannot be read. Choose it again.`) : error);
  }
}

/** The name of a file that the browser can no longer read: changed, removed, or a folder. fetch does not say so. */
async function unreadable() {
  for (const { file } of state.items) {
    try {
      await file.slice(0, 1).arrayBuffer();
    } catch {
      return file.name;
    }
  }
  return null;
}

function fail(error) {
  if (error.status === 401) draw.askForKey(error.message);
  else draw.failure(PASSING[error.status] ?? "No answer for this", error.message, error.status in PASSING);
  $("batch").hidden = true;
}

function finish(results, roundTripMs) {
  results.forEach((result, i) => (state.items[i].result = result));
  const good = results.filter((result) => !result.error).length;
  select(Math.max(results.findIndex((result) => !result.error), 0));
  if (results.length === 1) draw.roundTrip(roundTripMs);
  else draw.announce(`${good} of ${results.length} files classified.`);
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
  if (item.result.error) draw.failure("No answer for this", item.result.error.message, false);
  else draw.answer(item.result, state.models, askSet);
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
    else if (event.dataTransfer.types.includes("text/uri-list")) draw.failure("No answer for this", NOT_A_FILE, false);
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
