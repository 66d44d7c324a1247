// The mailbox's part of the core's Python face.
#include "bindings/bindings.h"
#include "shm/mailbox.h"

namespace dadt {
namespace {

void wait(Transit& transit, double timeout) {
  if (!wait_unlocked(transit, timeout)) throw Error(Code::kTimeout, transit.late(timeout));
  if (transit.error()) throw *transit.error();
}

int source(const Transit& transit) {
  if (!transit.done()) throw std::runtime_error(transit.title() + " is not done: call wait() first");
  return transit.source();
}

}  // namespace

void bind_mailbox(py::module_& module) {
  py::class_<Transit, std::shared_ptr<Transit>>(module, "Transit")
      .def_property_readonly("done", &Transit::done)
      .def("wait", &wait, py::arg("timeout"))
      .def_property_readonly("source", &source);
  py::class_<Mailbox, std::unique_ptr<Mailbox, DeleteUnlocked>>(module, "Mailbox")
      .def(py::init<int, int>(), py::arg("rank"), py::arg("world_size"))
      .def("endpoint", [](const Mailbox& mailbox) { return py::bytes(mailbox.endpoint()); })
      .def("connect", &Mailbox::connect, py::arg("endpoints"), py::arg("timeout"), Unlocked())
      .def(
          "send",
          [](Mailbox& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.send(reinterpret_cast<const void*>(address), bytes, peer, tag);
          },
          py::arg("address"), py::arg("bytes"), py::arg("peer"), py::arg("tag"), Unlocked())
      .def(
          "receive",
          [](Mailbox& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.receive(reinterpret_cast<void*>(address), bytes, peer, tag);
          },
          py::arg("address"), py::arg("bytes"), py::arg("peer"), py::arg("tag"), Unlocked())
      .def(
          "abort",
          [](Mailbox& mailbox, const py::str& reason, bool lost) {
            const Error error(lost ? Code::kPeerLost : Code::kAborted, utf8(reason));
            const Unlock unlocked;
            mailbox.abort(error);
          },
          py::arg("reason"), py::arg("lost") = false)
      .def("close", &Mailbox::close, Unlocked());
}

}  // namespace dadt
