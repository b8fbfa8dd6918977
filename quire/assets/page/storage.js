// What the browser keeps for this page. What it refuses to keep, because storage is blocked or full, lasts until the page is left.

class Store {
  #area;
  #refused = new Map();

  constructor(name) {
    try {
      this.#area = window[name];
    } catch {
      this.#area = null; // blocked: to name it is an error already
    }
  }

  get(key) {
    return this.#refused.get(key) ?? this.#area?.getItem(key) ?? null;
  }

  /** Returns whether the browser keeps the value. */
  set(key, value) {
    try {
      this.#area.setItem(key, value);
      this.#refused.delete(key);
      return true;
    } catch {
      this.#refused.set(key, value);
      return false;
    }
  }

  remove(key) {
    this.#refused.delete(key);
    this.#area?.removeItem(key);
  }

  keys() {
    return [...new Set([...Object.keys(this.#area || {}), ...this.#refused.keys()])];
  }
}

export const kept = new Store('localStorage');
export const keptInTab = new Store('sessionStorage');
