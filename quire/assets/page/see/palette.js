// Colours of canvases: those of the page's style sheet, and one for each owner of blocks.

const GOLDEN_ANGLE = 137.508;

const parse = (text) => {
  const hex = text.trim().replace('#', '');
  return [0, 2, 4].map((start) => parseInt(hex.slice(start, start + 2), 16));
};

function fromHSL(hue, saturation, lightness) {
  const amplitude = saturation * Math.min(lightness, 1 - lightness);
  const channel = (offset) => {
    const place = (offset + hue / 30) % 12;
    return Math.round(255 * (lightness - amplitude * Math.max(-1, Math.min(place - 3, 9 - place, 1))));
  };
  return [channel(0), channel(8), channel(4)];
}

export const css = ([red, green, blue], alpha = 1) => `rgba(${red}, ${green}, ${blue}, ${alpha})`;

/** Colours as `[red, green, blue]`. Read again after the event `themechange`. */
export class Palette {
  constructor() {
    const style = getComputedStyle(document.documentElement);
    const read = (name) => parse(style.getPropertyValue(`--${name}`));
    for (const name of ['surface', 'sunken', 'line', 'text', 'muted', 'accent', 'good', 'bad', 'warn', 'free', 'cached', 'other', 'host']) {
      this[name] = read(name);
    }
    this.isDark = this.surface[0] < 128;
  }

  owner(number) {
    if (!number) return this.muted;
    return fromHSL((number * GOLDEN_ANGLE + 170) % 360, 0.45, this.isDark ? 0.6 : 0.5);
  }
}

/** Pixels of a canvas for each CSS pixel. */
export const screenRatio = () => Math.min(2, window.devicePixelRatio || 1);

/** Makes a canvas as large as its element on this screen. Returns its context, scaled to CSS pixels, with width and height. */
export function fit(canvas) {
  const { clientWidth: width, clientHeight: height } = canvas;
  const ratio = screenRatio();
  const [across, down] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== across || canvas.height !== down) {
    canvas.width = across;
    canvas.height = down;
  }
  const context = canvas.getContext('2d');
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height, ratio };
}
