#include "negotiation/message.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace dadt {
namespace {

std::string framed(MessageType type, const std::string& body) {
  const uint32_t length = static_cast<uint32_t>(body.size() + 1);
  std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
  frame.push_back(static_cast<char>(type));
  return frame + body;
}

// Encodes the fields of a message. Reader has the same methods, so that one function `fields` for each kind
// of message serves both.
class Writer {
 public:
  template <typename T>
  using Of = const T;

  // Encodes a number with seven bits per byte, since nearly all numbers are small.
  void number(auto given) {
    uint64_t value = static_cast<uint64_t>(given);
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  // Encodes a number that is -1 or more.
  void place(int64_t value) { number(static_cast<uint64_t>(value) + 1); }
  void choice(auto value, uint64_t) { number(value); }
  void text(const std::string& text) {
    number(text.size());
    bytes_ += text;
  }
  void numbers(const auto& values) {
    items(values, [this](auto value) { number(value); });
  }
  // Encodes ids, given in any order, as bits with 64 ids per word; empty words are left out.
  void ids(std::vector<uint64_t> ids) {
    std::sort(ids.begin(), ids.end());
    std::vector<std::pair<uint64_t, uint64_t>> words;
    for (uint64_t id : ids) {
      if (words.empty() || words.back().first != id / 64) words.emplace_back(id / 64, 0);
      words.back().second |= uint64_t{1} << id % 64;
    }
    number(words.size());
    uint64_t last = 0;
    for (const auto& [index, bits] : words) {
      number(index - std::exchange(last, index));
      bytes_.append(reinterpret_cast<const char*>(&bits), sizeof bits);
    }
  }
  void items(const auto& items, auto&& each) {
    number(items.size());
    for (const auto& item : items) each(item);
  }

  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  template <typename T>
  using Of = T;

  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  template <typename Number>
  void number(Number& value) {
    value = static_cast<Number>(next());
  }
  // Decodes a number that is -1 or more. The subtraction is unsigned, so that 0 wraps around to -1.
  void place(int64_t& value) { value = static_cast<int64_t>(next() - 1); }
  template <typename Enum>
  void choice(Enum& value, uint64_t below) {
    const uint64_t found = next();
    if (found >= below) fail();
    value = static_cast<Enum>(found);
  }
  void text(std::string& text) {
    const size_t size = count();
    text.assign(take(size), size);
  }
  void numbers(auto& values) {
    values.resize(count());
    for (auto& value : values) number(value);
  }
  void ids(std::vector<uint64_t>& ids) {
    uint64_t index = 0;
    for (size_t words = count(); words > 0; --words) {
      index += next();
      uint64_t bits;
      std::memcpy(&bits, take(sizeof bits), sizeof bits);
      for (int bit = 0; bit < 64; ++bit) {
        if (bits >> bit & 1) ids.push_back(index * 64 + bit);
      }
    }
  }
  void items(auto& items, auto&& each) {
    for (size_t left = count(); left > 0; --left) each(items.emplace_back());
  }

 private:
  uint64_t next() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = static_cast<uint8_t>(*take(1));
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }
  // Decodes the number of items that follow, which cannot exceed the number of bytes that are left.
  size_t count() {
    const uint64_t value = next();
    if (value > bytes_.size() - at_) fail();
    return value;
  }
  const char* take(size_t size) {
    if (size > bytes_.size() - at_) fail();
    at_ += size;
    return bytes_.data() + at_ - size;
  }
  [[noreturn]] static void fail() {
    throw Error(Code::kComm,
                "a peer sent what is no message of DADT's: the ranks run different versions of it");
  }

  const std::string& bytes_;
  size_t at_ = 0;
};

template <typename Coder>
void fields(Coder& coder, typename Coder::template Of<Report>& report) {
  coder.number(report.seen);
  coder.number(report.step);
  coder.choice(report.waits, 2);
  coder.choice(report.joined, 2);
  coder.ids(report.ids);
  coder.items(report.requests, [&](auto& request) {
    coder.text(request.name);
    coder.text(request.signature);
    coder.text(request.group);
    coder.number(request.group_size);
    coder.choice(request.kind, kKinds);
    coder.choice(request.dtype, kDTypes);
    coder.choice(request.reduction, kReductions);
    coder.numbers(request.counts);
  });
}

template <typename Coder>
void fields(Coder& coder, typename Coder::template Of<Decision>& decision) {
  coder.number(decision.number);
  coder.items(decision.admitted, [&](auto& admission) {
    coder.number(admission.id);
    coder.text(admission.name);
  });
  coder.items(decision.batches, [&](auto& batch) {
    coder.numbers(batch.ids);
    coder.numbers(batch.missing);
    if (batch.missing.empty()) return;
    coder.text(batch.name);
    coder.choice(batch.dtype, kDTypes);
    coder.choice(batch.reduction, kReductions);
    coder.numbers(batch.counts);
  });
  coder.items(decision.failures, [&](auto& failure) {
    coder.choice(failure.code, kCodes);
    coder.text(failure.name);
    coder.text(failure.text);
    coder.numbers(failure.ranks);
  });
  coder.numbers(decision.evicted);
  coder.place(decision.last_joined);
}

template <typename Coder>
void fields(Coder& coder, typename Coder::template Of<GivingUp>& giving_up) {
  coder.place(giving_up.rank);
  coder.choice(giving_up.code, kCodes);
  coder.text(giving_up.text);
}

template <typename Message>
std::string written(MessageType type, const Message& message) {
  Writer writer;
  fields(writer, message);
  return framed(type, writer.bytes());
}

template <typename Message>
Message read(const std::string& body) {
  Reader reader(body);
  Message message;
  fields(reader, message);
  return message;
}

}  // namespace

size_t Request::bytes() const {
  return std::accumulate(counts.begin(), counts.end(), size_t{0}) * item_size(dtype);
}

std::string fused_name(const std::string& first, size_t tensors) {
  return tensors == 1 ? first : first + " and " + std::to_string(tensors - 1) + " more";
}

Error GivingUp::error() const {
  return Error(code, rank < 0 ? text : "rank " + std::to_string(rank) + " gave up: " + text);
}

std::string encode(const Report& report) { return written(MessageType::kReport, report); }
std::string encode(const Decision& decision) { return written(MessageType::kDecision, decision); }
std::string encode(const GivingUp& giving_up) { return written(MessageType::kGivingUp, giving_up); }
std::string encode(MessageType type, const std::string& text) { return framed(type, text); }

Report decode_report(const std::string& body) { return read<Report>(body); }
Decision decode_decision(const std::string& body) { return read<Decision>(body); }
GivingUp decode_giving_up(const std::string& body) { return read<GivingUp>(body); }

}  // namespace dadt
