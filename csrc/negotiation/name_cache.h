#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>

#include "negotiation/message.h"

namespace dadt {

// The requests that are known by an id, one of each name. What changes is told by a decision. Ids are never
// used twice: a rank may still name one that is gone.
class NameCache {
 public:
  NameCache() = default;
  NameCache(const NameCache&) = delete;
  NameCache& operator=(const NameCache&) = delete;

  // The request of this id; null if it is none, or gone.
  std::shared_ptr<const Request> find(uint64_t id) const;
  // The id of this request; 0 if its name has none, or one that stands for another request.
  uint64_t id_of(const Request& request) const;

  // The id becomes the one used last.
  void use(uint64_t id);
  // The new id of this request, in place of the one that its name has had.
  uint64_t admit(std::shared_ptr<const Request> request, Decision& decision);
  // Drops those not used for longest until `capacity` are left, save those whose names are pending.
  void trim(size_t capacity, const std::function<bool(const std::string& name)>& is_pending,
            Decision& decision);

 private:
  struct Cached {
    std::shared_ptr<const Request> request;
    std::list<uint64_t>::iterator age;
  };

  void evict(uint64_t id, Decision& decision);

  std::unordered_map<uint64_t, Cached> cached_;
  std::unordered_map<std::string, uint64_t> ids_;
  std::list<uint64_t> ages_;  // the one used last at the end
  uint64_t next_id_ = 1;
};

}  // namespace dadt
