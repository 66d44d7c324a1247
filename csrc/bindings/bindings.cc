// The Python bindings of the core, described in dadt/_core.pyi. No code outside csrc/bindings uses Python,
// and no thread of the core ever takes the GIL.
#include "bindings/bindings.h"

#include "engine/engine.h"
#include "engine/null.h"
#include "kernels/kernels.h"
#include "shm/shm.h"
#include "tcp/tcp.h"

using namespace dadt;

namespace {

std::vector<py::bytes> as_bytes(const std::vector<std::string>& lanes) {
  return std::vector<py::bytes>(lanes.begin(), lanes.end());
}

void translate(std::exception_ptr pending) {
  constexpr const char* kNames[] = {nullptr, "CommError", "PeerLost", "CommTimeout", "Mismatch", "Aborted"};
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const Error& error) {
    if (error.code() == Code::kInternal) return PyErr_SetObject(PyExc_RuntimeError, text(error.what()).ptr());
    const py::object type = py::module_::import("dadt.errors").attr(kNames[static_cast<int>(error.code())]);
    PyErr_SetObject(type.ptr(), text(error.what()).ptr());
  }
}

py::buffer_info buffer_of(const Received& received) {
  const Buffer& buffer = received.work->result().received[received.rank];
  return py::buffer_info(buffer.data.get(), 1, py::format_descriptor<uint8_t>::format(),
                         static_cast<py::ssize_t>(buffer.bytes));
}

float* floats(uintptr_t address) { return reinterpret_cast<float*>(address); }

Wires wires_of(const Addresses& addresses, const std::optional<std::vector<double>>& weights,
               double divisor) {
  if (addresses.empty() || (weights && weights->size() != addresses.size())) {
    throw std::invalid_argument(std::to_string(addresses.size()) +
                                " wires need as many weights, and at least one");
  }
  return {pointers<const uint8_t*>(addresses), weights.value_or(std::vector<double>()), divisor};
}

std::shared_ptr<Work> allreduce(Engine& engine, const Layout& layout, const Addresses& inputs,
                                const Addresses& outputs, std::string name, double weight, std::string lane,
                                Reduction reduction, bool unsure, Codec codec, uintptr_t owed, double keep,
                                int64_t plain, bool held, uintptr_t flat, size_t room) {
  Operation operation = allreduce_operation(layout, inputs, outputs, std::move(name), reduction);
  operation.weight = weight;
  operation.lane = std::move(lane);
  operation.unsure = unsure;
  operation.compression = {codec, floats(owed), keep};
  operation.plain = plain;
  operation.flat = reinterpret_cast<void*>(flat);
  operation.room = room;
  return engine.submit(std::move(operation), held);
}

std::shared_ptr<Work> broadcast(Engine& engine, const Layout& layout, const Addresses& tensors, int root,
                                std::string name, bool unsure) {
  Operation operation = broadcast_operation(layout, tensors, root, std::move(name));
  operation.unsure = unsure;
  return engine.submit(std::move(operation));
}

std::shared_ptr<Work> allgather(Engine& engine, std::string data, std::string name) {
  return engine.submit({.kind = Kind::kAllgather, .name = std::move(name), .lane = std::move(data)});
}

std::shared_ptr<Work> exchange(Engine& engine, const Pieces& sends, const std::optional<Pieces>& receives,
                               std::string name, bool unsure) {
  Operation operation = exchange_operation(sends, receives, std::move(name));
  operation.unsure = unsure;
  return engine.submit(std::move(operation));
}

Layout bytes_of(const Pieces& pieces) {
  std::vector<size_t> counts;
  for (const auto& [address, bytes] : pieces) counts.push_back(bytes);
  return Layout(DType::kUInt8, std::move(counts));
}

template <typename Pointer>
Addresses addresses(const std::vector<Pointer>& pointers) {
  Addresses result;
  result.reserve(pointers.size());
  for (const void* pointer : pointers) result.push_back(reinterpret_cast<uintptr_t>(pointer));
  return result;
}

void finish(Job& job, std::vector<std::string> lanes, double weight_sum, double seconds, double waited,
            size_t sent, size_t plain) {
  job.finish({.lanes = std::move(lanes),
              .weight_sum = weight_sum,
              .sent = sent,
              .plain = plain,
              .seconds = seconds,
              .waited = waited});
}

// Returns an operation on a single float32 tensor, for encoding or decoding it.
Operation flat(Codec codec, const void* input, void* output, size_t count) {
  return {.layout = Layout(DType::kFloat32, {count}),
          .inputs = {input},
          .outputs = {output},
          .compression = {.codec = codec}};
}

void compress_flat(Codec codec, uintptr_t source, size_t count, uintptr_t wire, uintptr_t owed, double keep) {
  Operation operation = flat(codec, floats(source), nullptr, count);
  operation.compression.owed = floats(owed);
  operation.compression.keep = keep;
  const Unlock unlocked;
  compress(operation, 0, block_count(count), reinterpret_cast<void*>(wire));
}

void decompress_flat(Codec codec, uintptr_t wire, uintptr_t destination, size_t count) {
  const Wires wires = wires_of({wire}, std::nullopt, 1);
  const Unlock unlocked;
  decompress(flat(codec, nullptr, floats(destination), count), 0, block_count(count), wires);
}

void combine_wires(Codec codec, const Addresses& wires, const std::optional<std::vector<double>>& weights,
                   double divisor, size_t first, size_t total, size_t blocks, uintptr_t wire, uintptr_t owed,
                   double share) {
  const Wires from = wires_of(wires, weights, divisor);
  const Unlock unlocked;
  combine(codec, from, first, total, blocks, reinterpret_cast<void*>(wire), floats(owed), share);
}

void bind_compression(py::module_& module) {
  module.attr("BLOCK") = kBlock;
  module.def("compress", &compress_flat, "codec"_a, "source"_a, "count"_a, "wire"_a, "owed"_a = 0,
             "keep"_a = 1.0);
  module.def("decompress", &decompress_flat, "codec"_a, "wire"_a, "destination"_a, "count"_a);
  module.def("combine", &combine_wires, "codec"_a, "wires"_a, "weights"_a.none(true), "divisor"_a, "first"_a,
             "total"_a, "blocks"_a, "wire"_a, "owed"_a, "share"_a);
}

void bind_types(py::module_& module) {
  auto dtype = py::enum_<DType>(module, "DType");
  for (int i = 0; i < kDTypes; ++i) dtype.value(kDTypeNames[i], static_cast<DType>(i));
  dtype.def_property_readonly("itemsize", &item_size);

  auto reduction = py::enum_<Reduction>(module, "Reduction");
  for (int i = 0; i < kReductions; ++i) reduction.value(kReductionNames[i], static_cast<Reduction>(i));

  auto codec = py::enum_<Codec>(module, "Codec");
  for (int i = 0; i < kCodecs; ++i) codec.value(kCodecNames[i], static_cast<Codec>(i));
  codec.def_property_readonly("block_bytes", &block_bytes);
  codec.def("wire_bytes", &wire_bytes, "values"_a);

  py::class_<Layout>(module, "Layout")
      .def(py::init<DType, std::vector<size_t>>(), "dtype"_a, "counts"_a)
      .def_property_readonly("dtype", &Layout::dtype)
      .def_property_readonly("counts", &Layout::counts)
      .def_property_readonly("total", &Layout::total);
}

template <typename Found>
auto of_links(Found (Links::*call)(int)) {
  return [call](TcpExecutor& tcp, int rank) {
    check_rank(rank, tcp.links()->world_size());
    return ((*tcp.links()).*call)(rank);
  };
}

using Counts = std::pair<uint64_t, uint64_t>;

std::optional<Counts> detach(TcpExecutor& tcp, int rank) {
  const auto found = of_links(&Links::detach)(tcp, rank);
  return found ? std::optional(Counts(found->data, found->mail)) : std::nullopt;
}

void bind_executors(py::module_& module) {
  py::class_<Executor, std::shared_ptr<Executor>>(module, "Executor")
      .def_property_readonly("name", &Executor::name)
      .def("endpoint", [](Executor& executor) { return py::bytes(executor.endpoint()); })
      .def("connect", &Executor::connect, "endpoints"_a, "timeout"_a, Unlocked());
  py::class_<ShmExecutor, Executor, std::shared_ptr<ShmExecutor>>(module, "ShmExecutor")
      .def(py::init<int, int>(), "rank"_a, "world_size"_a);
  py::class_<LinkCounts>(module, "LinkCounts")
      .def_readonly("sent", &LinkCounts::sent)
      .def_readonly("received", &LinkCounts::received)
      .def_readonly("resent", &LinkCounts::resent)
      .def_readonly("busy", &LinkCounts::busy)
      .def_readonly("round_trip", &LinkCounts::round_trip)
      .def_readonly("at", &LinkCounts::at)
      .def_readonly("queued", &LinkCounts::queued);
  py::class_<KeptLink>(module, "KeptLink")
      .def("enter", &KeptLink::enter, "generation"_a)
      .def("clear", &KeptLink::clear, "generation"_a, "seconds"_a, Unlocked())
      .def("end", &KeptLink::end)
      .def("take", &KeptLink::take);
  py::class_<TcpExecutor, Executor, std::shared_ptr<TcpExecutor>>(module, "TcpExecutor")
      .def(py::init<int, std::vector<std::vector<int>>, double>(), "rank"_a, "sockets"_a, "silence"_a = 0.0)
      .def("counts", &TcpExecutor::counts, Unlocked())
      .def_property_readonly("group", [](TcpExecutor& tcp) { return tcp.ways().settled(); })
      .def(
          "await_break", [](TcpExecutor& tcp) { return tcp.links()->await_break(); }, Unlocked())
      .def("detach", &detach, "rank"_a, Unlocked())
      .def("is_detached", of_links(&Links::is_detached), "rank"_a, Unlocked())
      .def("has_left", of_links(&Links::has_left), "rank"_a, Unlocked())
      .def("give_up", of_links(&Links::give_up), "rank"_a, Unlocked())
      .def(
          "release", [](TcpExecutor& tcp) { return tcp.links()->release(); }, Unlocked())
      .def(
          "attach",
          [](TcpExecutor& tcp, int rank, const std::vector<int>& sockets, Counts received) {
            check_rank(rank, tcp.links()->world_size());
            return tcp.links()->attach(rank, sockets, {received.first, received.second});
          },
          "rank"_a, "sockets"_a, "received"_a, Unlocked());
  py::class_<NullExecutor, Executor, std::shared_ptr<NullExecutor>>(module, "NullExecutor")
      .def(py::init<int, int>(), "rank"_a, "world_size"_a);
}

void bind_work(py::module_& module) {
  py::class_<Received>(module, "Received", py::buffer_protocol()).def_buffer(&buffer_of);
  py::class_<Work, std::shared_ptr<Work>>(module, "Work")
      .def_property_readonly("name", [](const Work& work) { return work.operation().name; })
      .def_property_readonly("done", &Work::done)
      .def(
          "wait", [](Work& work, double timeout) { wait_for(work, timeout, work.operation().title()); },
          "timeout"_a)
      .def_property_readonly("lanes", [](const Work& work) { return as_bytes(good(work).lanes); })
      .def_property_readonly("received", &received)
      .def_property_readonly("weight_sum", [](const Work& work) { return good(work).weight_sum; })
      .def_property_readonly("seconds", [](const Work& work) { return good(work).seconds; });

  py::class_<Job, std::shared_ptr<Job>>(module, "Job")
      .def_property_readonly("kind", [](const Job& job) { return kind_name(job.operation().kind); })
      .def_property_readonly("name", [](const Job& job) { return job.operation().name; })
      .def_property_readonly("layout",
                             [](const Job& job) -> std::optional<Layout> {
                               if (job.operation().kind == Kind::kAllgather) return std::nullopt;
                               return job.operation().layout;
                             })
      .def_property_readonly("receives",
                             [](const Job& job) -> std::optional<Layout> {
                               if (job.operation().outputs.empty()) return std::nullopt;
                               return job.operation().receives;
                             })
      .def_property_readonly("inputs", [](const Job& job) { return addresses(job.operation().inputs); })
      .def_property_readonly("outputs", [](const Job& job) { return addresses(job.operation().outputs); })
      .def_property_readonly("reduction", [](const Job& job) { return job.operation().reduction; })
      .def_property_readonly("weight", [](const Job& job) { return job.operation().weight; })
      .def_property_readonly("participants", [](const Job& job) { return job.operation().participants; })
      .def_property_readonly("root", [](const Job& job) { return job.operation().root; })
      .def_property_readonly("lane", [](const Job& job) { return py::bytes(job.operation().lane); })
      .def_property_readonly("codec", [](const Job& job) { return job.operation().compression.codec; })
      .def_property_readonly(
          "owed",
          [](const Job& job) { return reinterpret_cast<uintptr_t>(job.operation().compression.owed); })
      .def_property_readonly("plain", [](const Job& job) { return job.operation().plain_bytes(); })
      .def_property_readonly("keep", [](const Job& job) { return job.operation().compression.keep; })
      .def(
          "compress",
          [](const Job& job, size_t begin, size_t end, uintptr_t to) {
            job.compress(begin, end, reinterpret_cast<void*>(to));
          },
          "begin"_a, "end"_a, "wire"_a, Unlocked())
      .def(
          "decompress",
          [](const Job& job, const Addresses& addresses, const std::optional<std::vector<double>>& weights,
             double divisor) { job.decompress(wires_of(addresses, weights, divisor)); },
          "wires"_a, "weights"_a.none(true), "divisor"_a, Unlocked())
      .def(
          "pack",
          [](const Job& job, uintptr_t to, std::optional<double> factor, bool spread) {
            job.pack(reinterpret_cast<void*>(to), factor, spread);
          },
          "destination"_a, "factor"_a.none(true) = py::none(), "spread"_a = false, Unlocked())
      .def(
          "unpack",
          [](const Job& job, uintptr_t from, double scale, bool spread) {
            job.unpack(reinterpret_cast<void*>(from), scale, spread);
          },
          "source"_a, "scale"_a, "spread"_a = false, Unlocked())
      .def_property_readonly("flat",
                             [](const Job& job) { return reinterpret_cast<uintptr_t>(job.operation().flat); })
      .def_property_readonly("room", [](const Job& job) { return job.operation().room; })
      .def_property_readonly("spread_count", &Job::spread_count)
      .def_property_readonly("apart", &Job::apart)
      .def(
          "allocate",
          [](Job& job, const std::vector<size_t>& bytes) { return addresses(job.allocate(bytes)); },
          "bytes"_a)
      .def("finish", &finish, "lanes"_a, "weight_sum"_a, "seconds"_a, "waited"_a, "sent"_a = 0, "plain"_a = 0)
      .def(
          "fail",
          [](Job& job, const py::str& error, bool mismatch) {
            const Error reason(mismatch ? Code::kMismatch : Code::kComm, utf8(error));
            const Unlock unlocked;
            job.fail(reason);
          },
          "error"_a, "mismatch"_a = false)
      .def_property_readonly("unsure", [](const Job& job) { return job.operation().unsure; });
}

void bind_engine(py::module_& module) {
  py::class_<Engine, std::unique_ptr<Engine, DeleteUnlocked>>(module, "Engine")
      .def(py::init<std::shared_ptr<Executor>, int, int, double>(), "executor"_a.none(true), "rank"_a,
           "world_size"_a, "timeout"_a)
      .def("allreduce", &allreduce, "layout"_a, "inputs"_a, "outputs"_a, "name"_a, "weight"_a = 1.0,
           "lane"_a = py::bytes(), "reduction"_a = Reduction::kMean, "unsure"_a = false,
           "codec"_a = Codec::kNone, "owed"_a = 0, "keep"_a = 1.0, "plain"_a = -1, "held"_a = false,
           "flat"_a = 0, "room"_a = 0)
      .def("release", &Engine::release, "work"_a)
      .def("exchange", &exchange, "sends"_a, "receives"_a.none(true), "name"_a, "unsure"_a = false)
      .def("broadcast", &broadcast, "layout"_a, "tensors"_a, "root"_a, "name"_a, "unsure"_a = false)
      .def("allgather", &allgather, "data"_a, "name"_a)
      .def("pull", &Engine::pull, "timeout"_a, Unlocked())
      .def("abort", &abort_unlocked<Engine>, "reason"_a, "lost"_a = false)
      .def("close", &Engine::close, "timeout"_a, Unlocked())
      .def("record", &Engine::record, "timeline"_a, "track"_a)
      .def_property_readonly("sent", &Engine::sent)
      .def_property_readonly("closed", &Engine::closed)
      .def_property_readonly("error", [](const Engine& engine) { return text_of(engine.error()); });
}

}  // namespace

namespace dadt {

Operation allreduce_operation(const Layout& layout, const Addresses& inputs, const Addresses& outputs,
                              std::string name, Reduction reduction) {
  return {.kind = Kind::kAllreduce,
          .reduction = reduction,
          .name = std::move(name),
          .layout = layout,
          .inputs = pointers<const void*>(inputs),
          .outputs = pointers<void*>(outputs)};
}

Operation broadcast_operation(const Layout& layout, const Addresses& tensors, int root, std::string name) {
  return {.kind = Kind::kBroadcast,
          .name = std::move(name),
          .layout = layout,
          .inputs = pointers<const void*>(tensors),
          .outputs = pointers<void*>(tensors),
          .root = root};
}

Operation exchange_operation(const Pieces& sends, const std::optional<Pieces>& receives, std::string name) {
  Operation operation;
  operation.kind = Kind::kExchange;
  operation.name = std::move(name);
  operation.layout = bytes_of(sends);
  for (const auto& [address, bytes] : sends)
    operation.inputs.push_back(reinterpret_cast<const void*>(address));
  if (receives) {
    operation.receives = bytes_of(*receives);
    for (const auto& [address, bytes] : *receives)
      operation.outputs.push_back(reinterpret_cast<void*>(address));
  }
  return operation;
}

std::vector<Received> received(const std::shared_ptr<Work>& work) {
  std::vector<Received> all;
  for (size_t rank = 0; rank < good(*work).received.size(); ++rank) all.push_back({work, rank});
  return all;
}

}  // namespace dadt

PYBIND11_MODULE(_core, module) {
  module.attr("__version__") = DADT_VERSION;
  module.attr("simd") = kernels().name;
  py::register_local_exception_translator(&translate);
  bind_types(module);
  bind_compression(module);
  bind_executors(module);
  bind_work(module);
  bind_mailbox(module);
  bind_timeline(module);
  bind_engine(module);
  bind_negotiation(module);
  bind_kernels(module);
}
