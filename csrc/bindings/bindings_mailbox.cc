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
      .def("wait", &wait, "timeout"_a)
      .def_property_readonly("source", &source);
  py::class_<Mailbox, std::unique_ptr<Mailbox, DeleteUnlocked>>(module, "Mailbox")
      .def(py::init<int, int>(), "rank"_a, "world_size"_a)
      .def("endpoint", [](const Mailbox& mailbox) { return py::bytes(mailbox.endpoint()); })
      .def("connect", &Mailbox::connect, "endpoints"_a, "timeout"_a, Unlocked())
      .def(
          "send",
          [](Mailbox& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.send(reinterpret_cast<const void*>(address), bytes, peer, tag);
          },
          "address"_a, "bytes"_a, "peer"_a, "tag"_a, Unlocked())
      .def(
          "receive",
          [](Mailbox& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.receive(reinterpret_cast<void*>(address), bytes, peer, tag);
          },
          "address"_a, "bytes"_a, "peer"_a, "tag"_a, Unlocked())
      .def("abort", &abort_unlocked<Mailbox>, "reason"_a, "lost"_a = false)
      .def("close", &Mailbox::close, Unlocked());
}

}  // namespace dadt
