#pragma once

#include <cstdint>
#include <string>

namespace dadt {

// Notices are all that a rank sends on the first of its connections with another rank: the code of the error
// with which it fails, or one of the following codes, and a text.
constexpr uint32_t kBye = ~uint32_t{0};  // the rank ends normally
constexpr uint32_t kEntry = kBye - 1;    // the rank enters another generation; see KeptLink

// Sends a notice, whose text is cut if it is too long, without blocking. Returns whether all of it was sent.
// A notice is short and hardly any others wait with it, so it always fits into the socket's buffer.
bool send_notice(int socket, uint32_t code, std::string text);

// The notice that another rank sends, as far as it has arrived.
class LinkNotice {
 public:
  enum class Came { kPart, kAll, kEnd, kInvalid };

  // Reads bytes of the notice that have arrived, and none behind it. Never blocks. Returns kEnd if the other
  // side has closed the socket before all had arrived, and kInvalid if it is no notice.
  Came read(int socket);
  // Returns whether nothing of it has arrived.
  bool is_empty() const { return bytes_.empty(); }
  // These methods may be called once all of it has arrived.
  uint32_t code() const { return head().code; }
  std::string text() const { return bytes_.substr(sizeof(Head)); }

 private:
  struct Head {
    uint32_t code;
    uint32_t bytes;  // bytes of the text
  };

  friend bool send_notice(int socket, uint32_t code, std::string text);
  Head head() const;

  std::string bytes_;
};

}  // namespace dadt
