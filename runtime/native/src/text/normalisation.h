// Canonical composition of Unicode text (NFC, annex 15 of the standard), by tables of a text file.
#pragma once

#include <string>
#include <string_view>

#include "text/text_file.h"

namespace dlm {

// Composes `text` into `out`; false if it is composed already. `file` has tables for it.
bool compose(const TextFile& file, std::string_view text, std::string& out);

}  // namespace dlm
