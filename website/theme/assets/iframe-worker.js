// Search runs in a Worker, which browsers refuse to pages that were opened as files. There, and only
// there, a hidden frame with the same script takes its place: messages go to it and come back.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.srcdoc = `<script>
        self.postMessage = (data) => parent.postMessage({ worker: "${address}", data }, "*");
        self.importScripts = (...addresses) => Promise.all(addresses.map((one) =>
          new Promise((done, failed) => {
            const script = document.createElement("script");
            script.src = one; script.onload = done; script.onerror = failed;
            document.head.append(script);
          })));
      <\/script><script src="${address}"><\/script>`;
      this.ready = new Promise((done) => { frame.onload = () => done(frame.contentWindow); });
      addEventListener("message", (event) => {
        if (event.source !== frame.contentWindow || event.data.worker !== String(address)) return;
        const message = new MessageEvent("message", { data: event.data.data });
        this.dispatchEvent(message);
        if (this.onmessage) this.onmessage(message);
      });
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {}
  };
}
