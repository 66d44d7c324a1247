// Python bindings of the mailboxes.
#include "bindings/bindings.h"
#include "shm/mailbox.h"
#include "tcp/tcp.h"
#include "tcp/tcp_mailbox.h"

namespace dadt {
namespace {

void await_message(Transit& transit, double timeout) {
  if (!wait_unlocked(transit, timeout)) throw Error(Code::kTimeout, transit.late(timeout));
  if (transit.error()) throw *transit.error();
}

int source(const Transit& transit) {
  if (!transit.done()) throw std::runtime_error(transit.title() + " is not done: call wait() first");
  return transit.source();
}

// Binds the methods that all kinds of mailboxes have.
template <typename Class>
void bind_messages(Class& bound) {
  using Owner = typename Class::type;
  bound
      .def(
          "send",
          [](Owner& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.send(reinterpret_cast<const void*>(address), bytes, peer, tag);
          },
          "address"_a, "bytes"_a, "peer"_a, "tag"_a, Unlocked())
      .def(
          "receive",
          [](Owner& mailbox, uintptr_t address, size_t bytes, int peer, int64_t tag) {
            return mailbox.receive(reinterpret_cast<void*>(address), bytes, peer, tag);
          },
          "address"_a, "bytes"_a, "peer"_a, "tag"_a, Unlocked())
      .def("abort", &abort_unlocked<Owner>, "reason"_a, "lost"_a = false)
      .def("close", &Owner::close, Unlocked());
}

}  // namespace

void bind_mailbox(py::module_& module) {
  py::class_<Transit, std::shared_ptr<Transit>>(module, "Transit")
      .def_property_readonly("done", &Transit::done)
      .def("wait", &await_message, "timeout"_a)
      .def_property_readonly("source", &source);
  py::class_<Mailbox, std::unique_ptr<Mailbox, DeleteUnlocked>> shared(module, "Mailbox");
  shared.def(py::init<int, int>(), "rank"_a, "world_size"_a)
      .def("endpoint", [](const Mailbox& mailbox) { return py::bytes(mailbox.endpoint()); })
      .def("connect", &Mailbox::connect, "endpoints"_a, "timeout"_a, Unlocked());
  bind_messages(shared);
  py::class_<TcpMailbox, std::unique_ptr<TcpMailbox, DeleteUnlocked>> tcp(module, "TcpMailbox");
  tcp.def(py::init([](const TcpExecutor& beside) { return new TcpMailbox(beside.links()); }), "beside"_a)
      .def("counts", &TcpMailbox::counts, Unlocked());
  bind_messages(tcp);
}

}  // namespace dadt
