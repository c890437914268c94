// Scales large pictures down before they are sent, to twice the side that the networks need: a phone's photo takes 3 MB, its
// smaller picture 30 KB. Small pictures, and files that the browser cannot read, stay as they are. AVIF and HEIC become JPEG in
// a browser that reads them, so that no service needs to.

const FACTOR = 2;
const QUALITY = 0.9;
const LOW_QUALITY = 0.7; // with half the side, for a line that was too slow
const LARGE_BYTES = 300_000; // from here on a picture is coded anew, whatever its side
const USUAL_SIDE = 256; // px, of a service that does not say
const KINDS = ["image/jpeg", "image/png", "image/webp"]; // which every service reads
const PHONE_KINDS = ["image/avif", "image/heic", "image/heif"]; // all further kinds get the service's own message

/** Returns the shorter side of pictures to send, in px, by the answer of GET /v1/models; null is as no answer. */
export const shorterSide = (models) => FACTOR * (models?.resize_shorter ?? models?.input_size ?? USUAL_SIDE);

/**
 * Returns what to send for a file: a smaller JPEG, upright, with its side and the size before; or the file itself.
 * @param {boolean} isSlow  whether it did not arrive before: then the picture has half the side, which the networks need
 * @returns {Promise<{body: Blob, side?: number, before?: string}>}
 */
export async function shrink(file, shorter, isSlow = false) {
  const isOfPhone = PHONE_KINDS.includes(file.type);
  if (!isOfPhone && !KINDS.includes(file.type)) return { body: file };
  const side = isSlow ? shorter / FACTOR : shorter;
  try {
    // Colours are not converted to the screen's: the service does not convert a file's either.
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image", colorSpaceConversion: "none" });
    const { width, height } = bitmap;
    const isLarge = isSlow || isOfPhone || Math.min(width, height) > side || file.size > LARGE_BYTES;
    const body = isLarge && keepsPixels() ? await scaled(bitmap, side, isSlow ? LOW_QUALITY : QUALITY) : file;
    bitmap.close();
    const isBetter = body.size < file.size || (isOfPhone && body !== file);
    return isBetter ? { body, side: Math.min(side, width, height), before: `${width}x${height}` } : { body: file };
  } catch {
    return { body: file };
  }
}

/** Draws the picture on white, as the service lays what is transparent, and returns it as JPEG. */
function scaled(bitmap, shorter, quality) {
  const scale = Math.min(shorter / Math.min(bitmap.width, bitmap.height), 1);
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.round(side * scale));
  const canvas = new OffscreenCanvas(width, height);
  const context = canvas.getContext("2d", { alpha: false });
  context.fillStyle = "#fff";
  context.fillRect(0, 0, width, height);
  context.imageSmoothingQuality = "high";
  context.drawImage(bitmap, 0, 0, width, height);
  return canvas.convertToBlob({ type: "image/jpeg", quality });
}

/** Whether a canvas gives back what was drawn: browsers that hide who they are may return noise. */
function keepsPixels() {
  const context = new OffscreenCanvas(1, 1).getContext("2d");
  context.fillStyle = "rgb(160, 80, 40)";
  context.fillRect(0, 0, 1, 1);
  const pixel = context.getImageData(0, 0, 1, 1).data;
  return [160, 80, 40].every((value, i) => Math.abs(pixel[i] - value) < 5);
}
