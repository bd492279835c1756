// Canonical composition of Unicode text (NFC, annex 15 of the standard), by tables of a text file.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// `text` composed, in `out`; false where it is composed already, and `out` is left as it was.
// `file` has tables for it.
bool compose(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
