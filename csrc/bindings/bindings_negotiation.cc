// Python bindings of the negotiation of named tensors.
#include "bindings/bindings.h"
#include "negotiation/negotiation.h"

namespace dadt {
namespace {

std::string title_of(const Ticket& ticket) { return "\"" + ticket.name() + "\""; }

void await_decision(Ticket& ticket, double timeout) {
  try {
    wait_for(ticket, timeout, title_of(ticket));
  } catch (const Error& error) {
    if (ticket.decided()) throw;
    throw Error(error.code(),
                std::string(error.what()) + ": some rank has not submitted it, or not all of its group");
  }
}

std::shared_ptr<Ticket> allreduce(Negotiation& negotiation, std::string name, std::string signature,
                                  const Layout& layout, const Addresses& inputs, const Addresses& outputs,
                                  Reduction reduction, std::string group, uint64_t group_size) {
  return negotiation.submit(allreduce_operation(layout, inputs, outputs, std::move(name), reduction),
                            std::move(signature), std::move(group), group_size);
}

std::shared_ptr<Ticket> broadcast(Negotiation& negotiation, std::string name, std::string signature,
                                  const Layout& layout, const Addresses& tensors, int root, std::string group,
                                  uint64_t group_size) {
  return negotiation.submit(broadcast_operation(layout, tensors, root, std::move(name)), std::move(signature),
                            std::move(group), group_size);
}

std::shared_ptr<Ticket> exchange(Negotiation& negotiation, std::string name, std::string signature,
                                 const Pieces& sends, const std::optional<Pieces>& receives,
                                 std::string group, uint64_t group_size) {
  return negotiation.submit(exchange_operation(sends, receives, std::move(name)), std::move(signature),
                            std::move(group), group_size);
}

// Positions of streams, as Links has them, too.
using Position = std::array<uint64_t, 1>;

std::optional<Position> detach_from(Negotiation& negotiation, int rank) {
  const auto received = negotiation.detach(rank);
  return received ? std::optional(Position{*received}) : std::nullopt;
}

void bind_ticket(py::module_& module) {
  py::class_<Ticket, std::shared_ptr<Ticket>>(module, "Ticket")
      .def_property_readonly("name", &Ticket::name)
      .def_property_readonly("done", &Ticket::done)
      .def("wait", &await_decision, "timeout"_a)
      .def("tell_that_it_is_waited_for", &Ticket::tell_that_it_is_waited_for)
      .def_property_readonly("operation",
                             [](const Ticket& ticket) -> std::optional<std::string> {
                               const auto work = ticket.work();
                               return work ? std::optional(work->operation().name) : std::nullopt;
                             })
      .def_property_readonly("received",
                             [](const Ticket& ticket) {
                               good(ticket);
                               const auto work = ticket.work();
                               return work ? received(work) : std::vector<Received>{};
                             })
      .def_property_readonly("seconds", [](const Ticket& ticket) { return good(ticket).seconds; })
      .def_property_readonly("last_joined", [](const Ticket& ticket) {
        good(ticket);
        return ticket.last_joined();
      });
  py::class_<Stall>(module, "Stall")
      .def_readonly("name", &Stall::name)
      .def_readonly("seconds", &Stall::seconds)
      .def_readonly("submitted", &Stall::submitted)
      .def_readonly("missing", &Stall::missing)
      .def_readonly("steps", &Stall::steps)
      .def_readonly("group", &Stall::group)
      .def_readonly("group_has", &Stall::group_has)
      .def_readonly("group_size", &Stall::group_size);
  py::class_<Notice>(module, "Notice")
      .def_readonly("stall", &Notice::stall)
      .def_readonly("order", &Notice::order);
}

}  // namespace

void bind_negotiation(py::module_& module) {
  bind_ticket(module);
  py::class_<ToldTime, std::shared_ptr<ToldTime>>(module, "ToldTime")
      .def(py::init<>())
      .def("set", &ToldTime::set, py::arg("seconds"));
  py::class_<Negotiation, std::unique_ptr<Negotiation, DeleteUnlocked>>(module, "Negotiation")
      .def(py::init([](Engine& engine, Engine& broadcaster, int rank, int world_size,
                       const std::vector<int>& sockets, double cycle, size_t buffer_bytes,
                       size_t group_buffer_bytes, double stall_warning, std::shared_ptr<ToldTime> time,
                       size_t cache_capacity, double silence) {
             const NegotiationOptions options{.cycle = cycle,
                                              .buffer_bytes = buffer_bytes,
                                              .group_buffer_bytes = group_buffer_bytes,
                                              .stall_warning = stall_warning,
                                              .cache_capacity = cache_capacity};
             return std::unique_ptr<Negotiation, DeleteUnlocked>(new Negotiation(
                 engine, broadcaster, rank, world_size, sockets, options, std::move(time), silence));
           }),
           "engine"_a, "broadcaster"_a, "rank"_a, "world_size"_a, "sockets"_a, "cycle"_a, "buffer_bytes"_a,
           "group_buffer_bytes"_a, "stall_warning"_a, "time"_a.none(true) = py::none(),
           "cache_capacity"_a = NegotiationOptions().cache_capacity, "silence"_a = 0.0,
           py::keep_alive<1, 2>(), py::keep_alive<1, 3>())
      .def("allreduce", &allreduce, "name"_a, "signature"_a, "layout"_a, "inputs"_a, "outputs"_a,
           "reduction"_a, "group"_a = "", "group_size"_a = 0)
      .def("broadcast", &broadcast, "name"_a, "signature"_a, "layout"_a, "tensors"_a, "root"_a,
           "group"_a = "", "group_size"_a = 0)
      .def("exchange", &exchange, "name"_a, "signature"_a, "sends"_a, "receives"_a.none(true), "group"_a = "",
           "group_size"_a = 0)
      .def("join", &Negotiation::join)
      .def("set_step", &Negotiation::set_step, "step"_a)
      .def("abort", &abort_unlocked<Negotiation>, "reason"_a, "lost"_a = false)
      .def("notices", &Negotiation::notices, "timeout"_a, Unlocked())
      .def("order", &Negotiation::order, "text"_a)
      .def("leave", &Negotiation::leave)
      .def("close", &Negotiation::close, "timeout"_a, Unlocked())
      .def("turn", &Negotiation::turn)
      .def("await_break", &Negotiation::await_break, Unlocked())
      .def("detach", &detach_from, "rank"_a, Unlocked())
      .def("is_detached", &Negotiation::is_detached, "rank"_a, Unlocked())
      .def("has_left", &Negotiation::has_left, "rank"_a, Unlocked())
      .def("give_up", &Negotiation::give_up, "rank"_a, Unlocked())
      .def(
          "attach",
          [](Negotiation& negotiation, int rank, const std::array<int, 1>& sockets, Position received) {
            return negotiation.attach(rank, sockets[0], received[0]);
          },
          "rank"_a, "sockets"_a, "received"_a, Unlocked())
      .def("forsake", &Negotiation::forsake)
      .def_property_readonly("closed", &Negotiation::closed)
      .def_property_readonly("error",
                             [](const Negotiation& negotiation) { return text_of(negotiation.error()); });
}

}  // namespace dadt
