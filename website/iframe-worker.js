/* The search of the site runs in a worker, which browsers refuse to pages opened as files. There, a hidden frame
   does the work. The name of this file tells the plugin `offline` that it need not load one from outside. */
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<!doctype html><script src="${String(url).replace(/"/g, "%22")}"></` + "script>";
      this.frame = frame;
      this.ready = new Promise((done) => frame.addEventListener("load", () => done(this.listen()), { once: true }));
      document.body.append(frame);
    }

    listen() {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) =>
        setTimeout(() => this.dispatchEvent(new MessageEvent("message", { data })));
      return inside;
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
