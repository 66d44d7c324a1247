#pragma once

#include <cstddef>
#include <cstdint>

namespace dadt {

enum class DType : uint8_t {
  kFloat32 = 0,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
};
inline constexpr int kDTypes = 9;
inline constexpr int kFloatDTypes = 4;  // the first kFloatDTypes entries of DType are floating-point types

inline constexpr size_t kItemSizes[kDTypes] = {4, 8, 2, 2, 8, 4, 2, 1, 1};
inline constexpr const char* kDTypeNames[kDTypes] = {"float32", "float64", "float16", "bfloat16", "int64",
                                                     "int32",   "int16",   "int8",    "uint8"};

inline size_t item_size(DType dtype) { return kItemSizes[static_cast<int>(dtype)]; }
inline bool is_float(DType dtype) { return static_cast<int>(dtype) < kFloatDTypes; }
inline const char* dtype_name(DType dtype) { return kDTypeNames[static_cast<int>(dtype)]; }

}  // namespace dadt
