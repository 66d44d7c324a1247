// Python bindings of the kernels: loops over memory that reduce, scale, encode and decode values.
#include <numeric>

#include "bindings/bindings.h"
#include "kernels/kernels.h"

namespace dadt {
namespace {

void check_pairs(const std::vector<size_t>& counts, const Addresses& one, const Addresses& other) {
  if (one.size() != counts.size() || other.size() != counts.size()) {
    throw std::invalid_argument(std::to_string(counts.size()) + " counts for " + std::to_string(one.size()) +
                                " and " + std::to_string(other.size()) + " addresses");
  }
}

[[noreturn]] void no_float(DType dtype) {
  throw std::invalid_argument(std::string(dtype_name(dtype)) + " is no floating dtype");
}

void predict(DType dtype, const std::vector<size_t>& counts, const Addresses& parameters,
             const Addresses& displacements, double factor) {
  check_pairs(counts, parameters, displacements);
  const auto loop = kernels().predict[static_cast<int>(dtype)];
  if (loop == nullptr) no_float(dtype);
  const Unlock unlocked;
  for (size_t i = 0; i < counts.size(); ++i) {
    loop(reinterpret_cast<const void*>(parameters[i]), reinterpret_cast<void*>(displacements[i]), factor,
         counts[i]);
  }
}

void foresee_all(DType dtype, const std::vector<size_t>& counts, const Addresses& parameters,
                 const Addresses& ahead, const Addresses& momenta, const Addresses& squares,
                 const NextStep& step, const std::vector<Addresses>& sources,
                 const std::vector<double>& weights) {
  check_pairs(counts, parameters, ahead);
  check_pairs(counts, momenta, squares);
  for (const Addresses& column : sources) check_pairs(counts, column, column);
  if (sources.size() != weights.size()) {
    throw std::invalid_argument(std::to_string(sources.size()) + " columns of sources need as many weights");
  }
  if (!is_float(dtype)) no_float(dtype);
  const Unlock unlocked;
  std::vector<const void*> from;
  std::vector<double> by;
  const bool stream =
      std::accumulate(counts.begin(), counts.end(), size_t{0}) * item_size(dtype) >= kStreamBytes;
  for (size_t i = 0; i < counts.size(); ++i) {
    from.clear();
    by.clear();
    for (size_t s = 0; s < sources.size(); ++s) {
      if (sources[s][i] == 0) continue;  // a null address stands for zeros
      from.push_back(reinterpret_cast<const void*>(sources[s][i]));
      by.push_back(weights[s]);
    }
    foresee(dtype, reinterpret_cast<const void*>(parameters[i]), reinterpret_cast<void*>(ahead[i]),
            reinterpret_cast<const void*>(momenta[i]), reinterpret_cast<const void*>(squares[i]), step, from,
            by, counts[i], stream);
  }
}

void confine(DType dtype, const std::vector<size_t>& counts, const Addresses& squares,
             const Addresses& momenta, const Addresses& gradients, const MomentStep& step) {
  check_pairs(counts, squares, momenta);
  check_pairs(counts, gradients, gradients);
  const auto loop = kernels().confine[static_cast<int>(dtype)];
  if (loop == nullptr) no_float(dtype);
  const Unlock unlocked;
  for (size_t i = 0; i < counts.size(); ++i) {
    loop(reinterpret_cast<void*>(squares[i]), reinterpret_cast<const void*>(momenta[i]),
         reinterpret_cast<const void*>(gradients[i]), step, counts[i]);
  }
}

void reduce_sources(DType dtype, Reduction reduction, uintptr_t destination, const Addresses& sources,
                    const std::optional<std::vector<double>>& weights, double divisor, size_t count) {
  if (sources.empty() || (weights && weights->size() != sources.size())) {
    throw std::invalid_argument(std::to_string(sources.size()) +
                                " sources need as many weights, and at least one");
  }
  if (weights && reduction != Reduction::kMean && reduction != Reduction::kSum) {
    throw std::invalid_argument(std::string("a ") + reduction_name(reduction) + " has no weights");
  }
  const auto from = pointers<const void*>(sources);
  const Unlock unlocked;
  reduce(dtype, reduction, reinterpret_cast<void*>(destination), from.data(),
         weights ? weights->data() : nullptr, static_cast<int>(from.size()), divisor, count, false);
}

}  // namespace

void bind_kernels(py::module_& module) {
  module.def("predict", &predict, "dtype"_a, "counts"_a, "parameters"_a, "displacements"_a, "factor"_a);
  module.def("reduce", &reduce_sources, "dtype"_a, "reduction"_a, "destination"_a, "sources"_a,
             "weights"_a.none(true), "divisor"_a, "count"_a);
  py::class_<NextStep>(module, "NextStep")
      .def(py::init([](double momentum, double gradient, double decay, double keep, double square,
                       double squared, double root, double epsilon) {
             return NextStep{momentum, gradient, decay, keep, square, squared, root, epsilon};
           }),
           py::kw_only(), "momentum"_a, "gradient"_a, "decay"_a, "keep"_a, "square"_a, "squared"_a, "root"_a,
           "epsilon"_a);
  py::class_<MomentStep>(module, "MomentStep")
      .def(py::init([](double fresh, double beta2, double rest, double growth) {
             return MomentStep{fresh, beta2, rest, growth};
           }),
           py::kw_only(), "fresh"_a, "beta2"_a, "rest"_a, "growth"_a);
  module.def("confine", &confine, "dtype"_a, "counts"_a, "squares"_a, "momenta"_a, "gradients"_a, "step"_a);
  module.def("foresee", &foresee_all, "dtype"_a, "counts"_a, "parameters"_a, "ahead"_a, "momenta"_a,
             "squares"_a, "step"_a, "sources"_a, "weights"_a);
}

}  // namespace dadt
