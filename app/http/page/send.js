// Calls the service: JSON of its routes, and one picture at a time with the share of it that has been sent.

/** Errors that may pass by themselves, by status (0: no answer at all); only these offer another try. */
export const PASSING = {
  0: "No connection", 408: "Too slow", 429: "Busy right now", 500: "Something broke", 502: "Broken off", 503: "Not available", 504: "Too slow",
};

const SLOW_MS = 3000; // a picture that is still on its way after this, when its connection ends, was too slow for it
const SENT_WITHIN_MS = 8000; // less than a service's usual limit, at which a browser may send all again by itself

/** What an error means for the person at the page; the service's own words follow in brackets, unless they are for its operator. */
const MEANS = {
  408: "Your connection is too slow for this picture: it did not arrive in time. Try again, or choose a smaller picture.",
  413: "This picture is larger than the service takes.",
  429: "Many pictures are being answered right now. Try again in a moment.",
  500: "The service made a mistake. Try again; if it stays, tell its operator the request's number.",
  415: "Pictures of this kind cannot be read here. Choose a usual JPEG, PNG or WebP.",
  504: "The answer took too long. Try again in a moment.",
};
const NOT_SHRUNK =
  "Your connection is too slow for this picture, and this browser cannot make it smaller. Save it as a JPEG first, or use another connection.";
const FOR_OPERATORS = [408, 415, 504];

/** An error of the service, or of the way to it (status 0). */
export class ServiceError extends Error {
  constructor(message, status) {
    super(MEANS[status] ? MEANS[status] + (FOR_OPERATORS.includes(status) ? "" : ` (${message})`) : message);
    this.status = status;
  }
}

/** The error of a picture that came too late, if it can be sent only as it is. */
export const tooSlow = () => Object.assign(new ServiceError(NOT_SHRUNK), { status: 408 });

/** The service's routes begin where this file's folder lies: a route_prefix comes before them. */
const address = (path) => new URL(`..${path}`, import.meta.url);
const unreachable = () => new ServiceError("The service cannot be reached. Is it still running?", 0);

function checked(status, body) {
  if (status >= 200 && status < 300 && body) return body;
  throw new ServiceError(body?.error?.message ?? `The service answered ${status} and did not say why.`, status);
}

const ofKey = (key) => (key ? { authorization: `Bearer ${key}` } : {});

/** Fetches JSON; anything but a good answer becomes a ServiceError. */
export async function call(path, key, signal, method = "GET") {
  const response = await fetch(address(path), { method, headers: ofKey(key), signal }).catch(() => {
    throw unreachable();
  });
  return checked(response.status, await response.json().catch(() => null));
}

/**
 * Sends a picture as the body itself. fetch does not say how much of a body was sent, so this is an XMLHttpRequest.
 * @param {{body: Blob, before?: string}} sent  what shrink() made of a file
 * @param {(share: number) => void} report  gets the share that was sent, 0 to 1
 * @param {boolean} mayBeSmaller  whether to end with 408 if the picture is not sent soon
 */
export function upload(path, { body, before }, key, signal, report, mayBeSmaller) {
  return new Promise((resolve, reject) => {
    const request = new XMLHttpRequest();
    request.open("POST", address(path));
    const headers = { ...ofKey(key), ...(before && { "x-tandem-shrunk": before }) };
    for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
    request.responseType = "json";
    const started = performance.now();
    let isSent = false;
    request.upload.onprogress = ({ loaded, total }) => report(total ? loaded / total : 1);
    request.upload.onload = () => report((isSent = true) && 1);
    // A service that gives up answers 408 and closes; a browser that is still sending may see only the end.
    request.onerror = () => reject(isSent || performance.now() - started < SLOW_MS ? unreachable() : new ServiceError("", 408));
    const giveUp = () => {
      if (isSent) return;
      reject(new ServiceError("", 408));
      request.abort();
    };
    if (mayBeSmaller) setTimeout(giveUp, SENT_WITHIN_MS);
    request.onload = () => {
      try {
        resolve(checked(request.status, request.response));
      } catch (error) {
        reject(error);
      }
    };
    signal.addEventListener("abort", () => {
      request.abort();
      reject(new DOMException("another picture was chosen", "AbortError"));
    });
    request.send(body);
  });
}
