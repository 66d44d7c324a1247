#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace dadt {

// Why an operation failed; one to one with the classes of dadt/errors.py (kInternal: our bug, a
// RuntimeError).
enum class Code : int { kInternal = 0, kComm, kPeerLost, kTimeout, kMismatch, kAborted };
constexpr uint64_t kCodes = 6;

// A failure of the world, not of the program. The message is a sentence that a user can act on.
class Error : public std::runtime_error {
 public:
  Error(Code code, const std::string& message) : std::runtime_error(message), code_(code) {}
  Code code() const { return code_; }

 private:
  Code code_;
};

}  // namespace dadt
