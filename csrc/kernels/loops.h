#pragma once

#include <array>

// The loops in the tables of kernels, written once for the vector types `F32` and `F64`, which the including
// file defines for its instruction set, with kWidth, load, store, stream, fill, +, *, /, root, lesser and
// greater. For the reason of the unnamed namespace see number.h.
#include "kernels/coding.h"
#include "kernels/kernels.h"
#include "kernels/number.h"

namespace dadt {
namespace {

template <typename T>
struct Accumulator {
  using Scalar = float;
  using Vector = F32;
};
template <>
struct Accumulator<double> {
  using Scalar = double;
  using Vector = F64;
};

// Returns the number of elements until `address` is aligned for a streaming store of a whole vector.
template <typename T>
size_t elements_to_aligned(const T* address, size_t width, size_t count) {
  const size_t align = width * sizeof(T);
  const size_t over = reinterpret_cast<uintptr_t>(address) % align;
  const size_t missing = over == 0 ? 0 : (align - over) / sizeof(T);
  return missing < count ? missing : count;
}

// Returns whether stores past the cache are possible: they need aligned vectors, and so elements that lie at
// multiples of their size.
template <typename T>
bool can_stream(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(T) == 0;
}

// Operators that combine the values of two ranks, as vectors or scalars. kScaled: whether the result is
// divided by the divisor of the reduction.
struct Add {
  static constexpr bool kScaled = true;
  static auto join(auto a, auto b) { return a + b; }
};
struct Lesser {
  static constexpr bool kScaled = false;
  static auto join(auto a, auto b) { return lesser(a, b); }
};
struct Greater {
  static constexpr bool kScaled = false;
  static auto join(auto a, auto b) { return greater(a, b); }
};
struct Times {
  static constexpr bool kScaled = false;
  static auto join(auto a, auto b) { return a * b; }
};

template <typename T, typename Join, bool kWeighted>
void reduce_one(T* destination, const T* const* sources, const double* weights, int ranks,
                typename Accumulator<T>::Scalar factor, size_t i) {
  using Scalar = typename Accumulator<T>::Scalar;
  Scalar sum = widen(sources[0][i]);
  if (kWeighted) sum = sum * static_cast<Scalar>(weights[0]);
  for (int r = 1; r < ranks; ++r) {
    Scalar x = widen(sources[r][i]);
    if (kWeighted) x = x * static_cast<Scalar>(weights[r]);
    sum = Join::join(sum, x);
  }
  if (Join::kScaled) sum = sum * factor;
  narrow(sum, destination + i);
}

template <typename T, typename Join, bool kWeighted, bool kStream>
void reduce_loop(T* destination, const T* const* sources, const double* weights, int ranks,
                 typename Accumulator<T>::Scalar factor, size_t count) {
  using Scalar = typename Accumulator<T>::Scalar;
  using Vector = typename Accumulator<T>::Vector;
  constexpr size_t kWidth = Vector::kWidth;
  constexpr size_t kUnroll = 4;
  size_t i = 0;
  if (kStream) {
    const size_t head = elements_to_aligned(destination, kWidth, count);
    for (; i < head; ++i) reduce_one<T, Join, kWeighted>(destination, sources, weights, ranks, factor, i);
  }
  const Vector scale = Vector::fill(factor);
  for (; i + kUnroll * kWidth <= count; i += kUnroll * kWidth) {
    Vector sum[kUnroll];
    const Vector first = Vector::fill(kWeighted ? static_cast<Scalar>(weights[0]) : Scalar(1));
    for (size_t k = 0; k < kUnroll; ++k) {
      const Vector x = Vector::load(sources[0] + i + k * kWidth);
      sum[k] = kWeighted ? x * first : x;
    }
    for (int r = 1; r < ranks; ++r) {
      const Vector weight = Vector::fill(kWeighted ? static_cast<Scalar>(weights[r]) : Scalar(1));
      for (size_t k = 0; k < kUnroll; ++k) {
        const Vector x = Vector::load(sources[r] + i + k * kWidth);
        sum[k] = Join::join(sum[k], kWeighted ? x * weight : x);
      }
    }
    for (size_t k = 0; k < kUnroll; ++k) {
      if (Join::kScaled) sum[k] = sum[k] * scale;
      if (kStream) {
        sum[k].stream(destination + i + k * kWidth);
      } else {
        sum[k].store(destination + i + k * kWidth);
      }
    }
  }
  for (; i < count; ++i) reduce_one<T, Join, kWeighted>(destination, sources, weights, ranks, factor, i);
  if (kStream) stream_fence();
}

template <typename T>
void reduce_float(void* destination, const void* const* sources, const double* weights, int ranks,
                  double divisor, size_t count, bool stream) {
  using Scalar = typename Accumulator<T>::Scalar;
  T* to = static_cast<T*>(destination);
  const T* const* from = reinterpret_cast<const T* const*>(sources);
  const Scalar factor = static_cast<Scalar>(1.0 / divisor);
  if (weights != nullptr) return reduce_loop<T, Add, true, false>(to, from, weights, ranks, factor, count);
  if (stream && can_stream(to))
    return reduce_loop<T, Add, false, true>(to, from, nullptr, ranks, factor, count);
  return reduce_loop<T, Add, false, false>(to, from, nullptr, ranks, factor, count);
}

template <typename T, typename Join>
void fold_float(void* destination, const void* const* sources, int ranks, size_t count, bool stream) {
  T* to = static_cast<T*>(destination);
  const T* const* from = reinterpret_cast<const T* const*>(sources);
  if (stream && can_stream(to)) return reduce_loop<T, Join, false, true>(to, from, nullptr, ranks, 1, count);
  return reduce_loop<T, Join, false, false>(to, from, nullptr, ranks, 1, count);
}

// Combines two integers. Sums and products are computed in 64 unsigned bits, whose low bits are right for any
// width, so overflow wraps around and is not undefined.
inline uint64_t join_integers(auto a, auto b, Lesser) { return static_cast<uint64_t>(a < b ? a : b); }
inline uint64_t join_integers(auto a, auto b, Greater) { return static_cast<uint64_t>(a > b ? a : b); }
inline uint64_t join_integers(uint64_t a, uint64_t b, Add) { return a + b; }
inline uint64_t join_integers(uint64_t a, uint64_t b, Times) { return a * b; }

// Reduces integers block by block in a separate buffer, since the destination may be any of the sources.
template <typename T, typename Join>
void fold_integer(void* destination, const void* const* sources, int ranks, size_t count, bool) {
  constexpr size_t kBlock = 4096 / sizeof(T);
  T block[kBlock];
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = count - begin < kBlock ? count - begin : kBlock;
    std::memcpy(block, static_cast<const T*>(sources[0]) + begin, size * sizeof(T));
    for (int r = 1; r < ranks; ++r) {
      const T* from = static_cast<const T*>(sources[r]) + begin;
      for (size_t i = 0; i < size; ++i) block[i] = static_cast<T>(join_integers(block[i], from[i], Join()));
    }
    std::memcpy(static_cast<T*>(destination) + begin, block, size * sizeof(T));
  }
}

// Reduces integers: without weights in 64 bits, otherwise in long double, since weights may be fractions.
template <typename T>
void reduce_integer(void* destination, const void* const* sources, const double* weights, int ranks,
                    double divisor, size_t count, bool stream) {
  if (weights == nullptr && divisor == 1) {
    return fold_integer<T, Add>(destination, sources, ranks, count, stream);
  }
  T* to = static_cast<T*>(destination);
  const T* const* from = reinterpret_cast<const T* const*>(sources);
  for (size_t i = 0; i < count; ++i) {
    if (weights == nullptr) {
      uint64_t sum = 0;  // unsigned, so that overflow wraps around and is not undefined
      for (int r = 0; r < ranks; ++r) sum += static_cast<uint64_t>(static_cast<int64_t>(from[r][i]));
      to[i] = static_cast<T>(static_cast<int64_t>(sum) / static_cast<int64_t>(divisor));
    } else {
      long double sum = 0;
      for (int r = 0; r < ranks; ++r) sum += static_cast<long double>(from[r][i]) * weights[r];
      to[i] = static_cast<T>(sum / static_cast<long double>(divisor));
    }
  }
}

template <typename T>
void scale_float(void* destination, const void* source, double factor, size_t count) {
  const double weights[1] = {factor};
  reduce_float<T>(destination, &source, weights, 1, 1.0, count, false);
}

template <typename T>
void scale_integer(void* destination, const void* source, double factor, size_t count) {
  const T* from = static_cast<const T*>(source);
  T* to = static_cast<T*>(destination);
  for (size_t i = 0; i < count; ++i) to[i] = static_cast<T>(static_cast<long double>(from[i]) * factor);
}

template <typename T>
void predict_float(const void* parameter, void* displacement, double factor, size_t count) {
  using Scalar = typename Accumulator<T>::Scalar;
  using Vector = typename Accumulator<T>::Vector;
  const T* p = static_cast<const T*>(parameter);
  T* d = static_cast<T*>(displacement);
  const Vector scale = Vector::fill(static_cast<Scalar>(factor));
  size_t i = 0;
  for (; i + Vector::kWidth <= count; i += Vector::kWidth) {
    (Vector::load(p + i) + Vector::load(d + i) * scale).store(d + i);
  }
  for (; i < count; ++i) narrow(widen(p[i]) + widen(d[i]) * static_cast<Scalar>(factor), d + i);
}

template <typename T, bool kStream>
void foresee_loop(const void* parameter, const void* expected, void* ahead, const void* momentum,
                  const void* square, const NextStep& step, size_t count) {
  using Scalar = typename Accumulator<T>::Scalar;
  using Vector = typename Accumulator<T>::Vector;
  const T* p = static_cast<const T*>(parameter);
  const T* e = static_cast<const T*>(expected);
  T* a = static_cast<T*>(ahead);
  const T* m = static_cast<const T*>(momentum);
  const T* v = static_cast<const T*>(square);
  const Vector keep = Vector::fill(static_cast<Scalar>(step.keep));
  const Vector decay = Vector::fill(static_cast<Scalar>(step.decay));
  const Vector by_momentum = Vector::fill(static_cast<Scalar>(step.momentum));
  const Vector by_gradient = Vector::fill(static_cast<Scalar>(step.gradient));
  const Vector by_square = Vector::fill(static_cast<Scalar>(step.square));
  const Vector by_squared = Vector::fill(static_cast<Scalar>(step.squared));
  const Vector root = Vector::fill(static_cast<Scalar>(step.root));
  const Vector epsilon = Vector::fill(static_cast<Scalar>(step.epsilon));
  const auto one = [&](size_t i) {
    const Scalar w = widen(p[i]);
    const Scalar g = widen(e[i]) + w * static_cast<Scalar>(step.decay);
    Scalar move = g * static_cast<Scalar>(step.gradient);
    if (m != nullptr) move = widen(m[i]) * static_cast<Scalar>(step.momentum) + move;
    if (v != nullptr) {
      const Scalar moment =
          widen(v[i]) * static_cast<Scalar>(step.square) + g * g * static_cast<Scalar>(step.squared);
      move = move / (root_of(moment) * static_cast<Scalar>(step.root) + static_cast<Scalar>(step.epsilon));
    }
    narrow(move + w * static_cast<Scalar>(step.keep), a + i);
  };
  size_t i = 0;
  for (const size_t head = kStream ? elements_to_aligned(a, Vector::kWidth, count) : 0; i < head; ++i) one(i);
  for (; i + Vector::kWidth <= count; i += Vector::kWidth) {
    const Vector old = Vector::load(p + i);
    const Vector g = Vector::load(e + i) + old * decay;
    Vector move = g * by_gradient;
    if (m != nullptr) move = Vector::load(m + i) * by_momentum + move;
    if (v != nullptr) {
      const Vector moment = Vector::load(v + i) * by_square + g * g * by_squared;
      move = move / (moment.root() * root + epsilon);
    }
    const Vector to = move + old * keep;
    if (kStream) {
      to.stream(a + i);
    } else {
      to.store(a + i);
    }
  }
  for (; i < count; ++i) one(i);
  if (kStream) stream_fence();
}

template <typename T>
void foresee_float(const void* parameter, const void* expected, void* ahead, const void* momentum,
                   const void* square, const NextStep& step, size_t count, bool stream) {
  if (stream && can_stream(static_cast<T*>(ahead))) {
    foresee_loop<T, true>(parameter, expected, ahead, momentum, square, step, count);
  } else {
    foresee_loop<T, false>(parameter, expected, ahead, momentum, square, step, count);
  }
}

template <typename T>
void confine_float(void* square, const void* momentum, const void* gradient, const MomentStep& step,
                   size_t count) {
  using Scalar = typename Accumulator<T>::Scalar;
  using Vector = typename Accumulator<T>::Vector;
  T* to = static_cast<T*>(square);
  const T* m = static_cast<const T*>(momentum);
  const T* g = static_cast<const T*>(gradient);
  const Scalar keep = static_cast<Scalar>(1 - step.fresh), fresh = static_cast<Scalar>(step.fresh);
  const Scalar beta2 = static_cast<Scalar>(step.beta2), less = static_cast<Scalar>(step.beta2 - 1);
  const Scalar rest = static_cast<Scalar>(step.rest), growth = static_cast<Scalar>(step.growth);
  const auto confined = [](auto v, auto first, auto grad, auto... f) {
    const auto [keep_, fresh_, rest_, growth_, less_, beta2_] = std::array{f...};
    const auto after = first * keep_ + grad * fresh_;
    return (greater(v * growth_, after * after * rest_) + grad * grad * less_) / beta2_;
  };
  size_t i = 0;
  for (; i + Vector::kWidth <= count; i += Vector::kWidth) {
    confined(Vector::load(to + i), Vector::load(m + i), Vector::load(g + i), Vector::fill(keep),
             Vector::fill(fresh), Vector::fill(rest), Vector::fill(growth), Vector::fill(less),
             Vector::fill(beta2))
        .store(to + i);
  }
  for (; i < count; ++i) {
    narrow(confined(widen(to[i]), widen(m[i]), widen(g[i]), keep, fresh, rest, growth, less, beta2), to + i);
  }
}

void copy_bytes(void* destination, const void* source, size_t bytes, bool stream) {
  if (!stream || reinterpret_cast<uintptr_t>(destination) % sizeof(float) != 0) {
    std::memcpy(destination, source, bytes);
    return;
  }
  float* to = static_cast<float*>(destination);
  const float* from = static_cast<const float*>(source);
  const size_t count = bytes / sizeof(float);
  const size_t head = elements_to_aligned(to, F32::kWidth, count);
  std::memcpy(to, from, head * sizeof(float));
  size_t i = head;
  for (; i + F32::kWidth <= count; i += F32::kWidth) F32::load(from + i).stream(to + i);
  std::memcpy(to + i, from + i, bytes - i * sizeof(float));
  stream_fence();
}

// A row of a table, with one loop per dtype in the order of DType.
template <typename Join>
struct Folds {
  static constexpr Kernels::Fold kRow[kDTypes] = {
      fold_float<float, Join>,     fold_float<double, Join>,    fold_float<Half, Join>,
      fold_float<BFloat, Join>,    fold_integer<int64_t, Join>, fold_integer<int32_t, Join>,
      fold_integer<int16_t, Join>, fold_integer<int8_t, Join>,  fold_integer<uint8_t, Join>};
};

constexpr Kernels make_kernels(const char* name) {
  return Kernels{name,
                 {reduce_float<float>, reduce_float<double>, reduce_float<Half>, reduce_float<BFloat>,
                  reduce_integer<int64_t>, reduce_integer<int32_t>, reduce_integer<int16_t>,
                  reduce_integer<int8_t>, reduce_integer<uint8_t>},
                 Folds<Lesser>::kRow,
                 Folds<Greater>::kRow,
                 Folds<Times>::kRow,
                 {scale_float<float>, scale_float<double>, scale_float<Half>, scale_float<BFloat>,
                  scale_integer<int64_t>, scale_integer<int32_t>, scale_integer<int16_t>,
                  scale_integer<int8_t>, scale_integer<uint8_t>},
                 {predict_float<float>, predict_float<double>, predict_float<Half>, predict_float<BFloat>},
                 {foresee_float<float>, foresee_float<double>, foresee_float<Half>, foresee_float<BFloat>},
                 {confine_float<float>, confine_float<double>, confine_float<Half>, confine_float<BFloat>},
                 copy_bytes,
                 {nullptr, encode_short<BFloat>, encode_short<Half>, encode_integers<Int8>,
                  encode_integers<Int4>, encode_bits<Bits2>, encode_bits<Bits1>},
                 {nullptr, decode_short<BFloat>, decode_short<Half>, decode_integers<Int8>,
                  decode_integers<Int4>, decode_bits<Bits2>, decode_bits<Bits1>},
                 {gather_values<float>, gather_values<double>, gather_short<Half>, gather_short<BFloat>},
                 settle,
                 {scatter_values<float>, scatter_values<double>, scatter_short<Half>, scatter_short<BFloat>}};
}

}  // namespace
}  // namespace dadt
