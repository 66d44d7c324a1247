#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dadt {

// Reasons why an operation failed. Each code corresponds to a class in dadt/errors.py, except kInternal: a
// bug in DADT, which is raised as RuntimeError.
enum class Code : int { kInternal = 0, kComm, kPeerLost, kTimeout, kMismatch, kAborted };
constexpr uint64_t kCodes = 6;

// A failure caused by the environment, not by a bug. The message is a sentence that a user can act on.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace dadt
