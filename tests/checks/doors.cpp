#include "../link/doors.h"

int main() { return every_door("doors") == 0 ? 0 : 1; }
