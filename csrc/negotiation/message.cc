#include "negotiation/message.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

namespace dadt {
namespace {

class Writer {
 public:
  // Seven bits a byte: nearly all numbers are small.
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) bytes_.push_back(static_cast<char>(value | 0x80));
    bytes_.push_back(static_cast<char>(value));
  }
  void word(uint64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof value); }
  void text(const std::string& text) {
    number(text.size());
    bytes_ += text;
  }
  template <typename Number>
  void numbers(const std::vector<Number>& values) {
    number(values.size());
    for (Number value : values) number(value);
  }
  // As bits, 64 ids a word, without the words that are empty. In any order.
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
      word(bits);
    }
  }
  std::string framed(MessageType type) const {
    const uint32_t length = static_cast<uint32_t>(bytes_.size() + 1);
    std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
    frame.push_back(static_cast<char>(type));
    return frame + bytes_;
  }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(const std::string& bytes) : bytes_(bytes) {}

  uint64_t number() {
    uint64_t value = 0;
    for (int shift = 0; shift < 64; shift += 7) {
      const uint8_t byte = static_cast<uint8_t>(*take(1));
      value |= uint64_t{byte & 0x7fu} << shift;
      if (byte < 0x80) return value;
    }
    fail();
  }
  uint64_t word() {
    uint64_t value;
    std::memcpy(&value, take(sizeof value), sizeof value);
    return value;
  }
  // How many things follow; each has a byte at least.
  size_t count() {
    const uint64_t value = number();
    if (value > bytes_.size() - at_) fail();
    return value;
  }
  std::string text() {
    const size_t size = count();
    return std::string(take(size), size);
  }
  template <typename Number>
  std::vector<Number> numbers() {
    std::vector<Number> values(count());
    for (Number& value : values) value = static_cast<Number>(number());
    return values;
  }
  template <typename Enum>
  Enum choice(uint64_t below) {
    const uint64_t value = number();
    if (value >= below) fail();
    return static_cast<Enum>(value);
  }
  std::vector<uint64_t> ids() {
    std::vector<uint64_t> ids;
    uint64_t index = 0;
    for (size_t words = count(); words > 0; --words) {
      index += number();
      const uint64_t bits = word();
      for (int bit = 0; bit < 64; ++bit) {
        if (bits >> bit & 1) ids.push_back(index * 64 + bit);
      }
    }
    return ids;
  }

 private:
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

void write(Writer& to, const Request& request) {
  to.text(request.name);
  to.text(request.signature);
  to.text(request.group);
  to.number(request.group_size);
  to.number(static_cast<uint64_t>(request.kind));
  to.number(static_cast<uint64_t>(request.dtype));
  to.number(static_cast<uint64_t>(request.reduction));
  to.numbers(request.counts);
}

Request read_request(Reader& from) {
  Request request;
  request.name = from.text();
  request.signature = from.text();
  request.group = from.text();
  request.group_size = from.number();
  request.kind = from.choice<Kind>(kKinds);
  request.dtype = from.choice<DType>(kDTypes);
  request.reduction = from.choice<Reduction>(kReductions);
  request.counts = from.numbers<size_t>();
  return request;
}

void write(Writer& to, const Batch& batch) {
  to.numbers(batch.ids);
  to.numbers(batch.missing);
  if (batch.missing.empty()) return;
  to.text(batch.name);
  to.number(static_cast<uint64_t>(batch.dtype));
  to.number(static_cast<uint64_t>(batch.reduction));
  to.numbers(batch.counts);
}

Batch read_batch(Reader& from) {
  Batch batch;
  batch.ids = from.numbers<uint64_t>();
  batch.missing = from.numbers<uint64_t>();
  if (batch.missing.empty()) return batch;
  batch.name = from.text();
  batch.dtype = from.choice<DType>(kDTypes);
  batch.reduction = from.choice<Reduction>(kReductions);
  batch.counts = from.numbers<size_t>();
  return batch;
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

std::string encode(const Report& report) {
  Writer to;
  to.number(report.seen);
  to.number(static_cast<uint64_t>(report.step));
  to.number(report.waits);
  to.number(report.joined);
  to.ids(report.ids);
  to.number(report.requests.size());
  for (const Request& request : report.requests) write(to, request);
  return to.framed(MessageType::kReport);
}

Report decode_report(const std::string& body) {
  Reader from(body);
  Report report;
  report.seen = from.number();
  report.step = static_cast<int64_t>(from.number());
  report.waits = from.choice<bool>(2);
  report.joined = from.choice<bool>(2);
  report.ids = from.ids();
  for (size_t left = from.count(); left > 0; --left) report.requests.push_back(read_request(from));
  return report;
}

std::string encode(const Decision& decision) {
  Writer to;
  to.number(decision.number);
  to.number(decision.admitted.size());
  for (const auto& [id, name] : decision.admitted) {
    to.number(id);
    to.text(name);
  }
  to.number(decision.batches.size());
  for (const Batch& batch : decision.batches) write(to, batch);
  to.number(decision.failures.size());
  for (const auto& [code, name, text, ranks] : decision.failures) {
    to.number(static_cast<uint64_t>(code));
    to.text(name);
    to.text(text);
    to.numbers(ranks);
  }
  to.numbers(decision.evicted);
  to.number(static_cast<uint64_t>(decision.last_joined) + 1);
  return to.framed(MessageType::kDecision);
}

Decision decode_decision(const std::string& body) {
  Reader from(body);
  Decision decision;
  decision.number = from.number();
  for (size_t left = from.count(); left > 0; --left) {
    const uint64_t id = from.number();
    decision.admitted.push_back({id, from.text()});
  }
  for (size_t left = from.count(); left > 0; --left) decision.batches.push_back(read_batch(from));
  for (size_t left = from.count(); left > 0; --left) {
    const Code code = from.choice<Code>(kCodes);
    std::string name = from.text();
    std::string text = from.text();
    decision.failures.push_back({code, std::move(name), std::move(text), from.numbers<int>()});
  }
  decision.evicted = from.numbers<uint64_t>();
  decision.last_joined = static_cast<int64_t>(from.number() - 1);  // before the cast, where it wraps
  return decision;
}

std::string encode(const GivingUp& giving_up) {
  Writer to;
  to.number(static_cast<uint64_t>(giving_up.rank) + 1);
  to.number(static_cast<uint64_t>(giving_up.code));
  to.text(giving_up.text);
  return to.framed(MessageType::kGivingUp);
}

GivingUp decode_giving_up(const std::string& body) {
  Reader from(body);
  GivingUp giving_up;
  giving_up.rank = static_cast<int64_t>(from.number() - 1);
  giving_up.code = from.choice<Code>(kCodes);
  giving_up.text = from.text();
  return giving_up;
}

std::string encode(MessageType type, const std::string& text) {
  const uint32_t length = static_cast<uint32_t>(text.size() + 1);
  std::string frame(reinterpret_cast<const char*>(&length), sizeof length);
  frame.push_back(static_cast<char>(type));
  return frame + text;
}

}  // namespace dadt
