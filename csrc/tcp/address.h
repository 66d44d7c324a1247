#pragma once

#include <string>

namespace dadt {

// The address of the other end of a socket, as text; empty if it has none.
std::string address_of(int socket);

// As in "rank 2 (10.0.0.3)".
std::string ranked(int rank, const std::string& address);

}  // namespace dadt
