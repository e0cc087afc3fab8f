from shoal.control.serve import main

main()
