// Python bindings of the timeline. Times are in seconds of time.perf_counter, which reads the same clock as
// the core.
#include <tuple>

#include "bindings/bindings.h"
#include "engine/timeline.h"

namespace dadt {
namespace {

Clock::time_point at(double seconds) {
  return Clock::time_point(
      std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}

void step(Timeline& timeline, int64_t number, double begin, double end,
          std::vector<std::tuple<std::string, double, double>> waits) {
  std::vector<Wait> all;
  all.reserve(waits.size());
  for (auto& [name, from, to] : waits) all.push_back({std::move(name), at(from), at(to)});
  timeline.step(number, at(begin), at(end), all);
}

py::bytes drain(Timeline& timeline, double timeout) {
  std::string text;
  {
    const Unlock unlocked;
    text = timeline.drain(timeout);
  }
  return py::bytes(text);
}

}  // namespace

void bind_timeline(py::module_& module) {
  py::class_<Timeline, std::shared_ptr<Timeline>>(module, "Timeline")
      .def(py::init([](int rank, double origin) { return std::make_shared<Timeline>(rank, at(origin)); }),
           "rank"_a, "origin"_a)
      .def("step", &step, "number"_a, "begin"_a, "end"_a, "waits"_a)
      .def("drain", &drain, "timeout"_a)
      .def("close", &Timeline::close)
      .def_property_readonly("dropped", &Timeline::dropped);
}

}  // namespace dadt
