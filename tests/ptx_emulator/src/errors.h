// How the emulator fails: one exception type that carries what the user is told and the CUDA error the launch returns.
#pragma once

#include <stdexcept>
#include <string>

namespace ptx_emulator {

// The kind of fault; runtime_errors.cpp maps each to a cudaError_t.
enum class Fault {
    kInvalidPtx,            // text that does not parse, an opcode or modifier the emulator does not know
    kMissingKernel,         // no PTX for a kernel name
    kInvalidConfiguration,  // grid, block, cluster or shared memory beyond the device
    kIllegalAddress,        // access outside of a state space
    kMisalignedAddress,     // access below its natural alignment
    kIllegalInstruction,    // operands that break a rule of the PTX ISA
    kDeadlock,              // no warp and no asynchronous operation can go on
    kHazard,                // the happens-before checker found a race or a missing wait
    kTrap,                  // trap, or a failed device assert
    kInvalidArgument,       // a host pointer that cannot be followed
    kOutOfMemory,           // an allocation that the device, or the host, has no room for
    kUnsupported,           // a host function or feature outside of the model
};

class EmulationError : public std::runtime_error {
  public:
    EmulationError(Fault fault, const std::string& message) : std::runtime_error(message), fault_(fault) {}
    Fault fault() const { return fault_; }

  private:
    Fault fault_;
};

// printf into a std::string.
std::string format(const char* pattern, ...) __attribute__((format(printf, 1, 2)));

[[noreturn]] void raise(Fault fault, const char* pattern, ...) __attribute__((format(printf, 2, 3)));

}  // namespace ptx_emulator
