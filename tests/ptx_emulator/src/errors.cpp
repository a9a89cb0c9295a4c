#include "errors.h"

#include <cstdarg>
#include <cstdio>

namespace ptx_emulator {

static std::string format_list(const char* pattern, va_list arguments) {
    va_list copy;
    va_copy(copy, arguments);
    const int size = std::vsnprintf(nullptr, 0, pattern, copy);
    va_end(copy);
    std::string text(size > 0 ? size : 0, '\0');
    if (size > 0) std::vsnprintf(&text[0], text.size() + 1, pattern, arguments);
    return text;
}

std::string format(const char* pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    std::string text = format_list(pattern, arguments);
    va_end(arguments);
    return text;
}

void raise(Fault fault, const char* pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    std::string text = format_list(pattern, arguments);
    va_end(arguments);
    throw EmulationError(fault, text);
}

}  // namespace ptx_emulator
